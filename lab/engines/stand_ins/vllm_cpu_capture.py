"""A plugin of vLLM 0.29: its CPU kernels report the experts that they choose, as its GPU kernels do.

Only the report is added; vLLM itself collects, stores and returns the routes.
"""


def register():
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    choose = Experts._select_experts

    def choose_and_report(self, *arguments, **keywords):
        weights, ids = choose(self, *arguments, **keywords)
        if report := getattr(self, "capture_fn", None):
            report(ids)
        return weights, ids

    Experts._select_experts = choose_and_report
    Experts.supports_routing_replay_capture = lambda self: True
    Experts.set_capture_fn = lambda self, report: setattr(self, "capture_fn", report)
