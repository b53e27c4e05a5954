"""ForeMoE plans the placement of experts of Mixture-of-Experts models in reinforcement learning.

    import foremoe

    trace = foremoe.read_trace("step.trace.safetensors")
    load = foremoe.collect(trace, ranks=8)
    plan = foremoe.plan(load, guest_slots=1)
    assert not foremoe.check(plan, load)
    print(foremoe.figures(plan, load)["rho"])

Arrays are numpy arrays. Returned arrays are views. An argument with another dtype or layout than documented raises an
InputError that names it. Long calls release the GIL.
"""

from ._core import (
    Collector,
    Copy,
    Evaluation,
    GradientReturn,
    Homes,
    Load,
    Plan,
    PlanTimes,
    RankTurn,
    RankTurns,
    RunningPlan,
    Trace,
    __version__,
    batch,
    clusters,
    limit_memory,
    model_parameters,
    models,
    policies,
)
from ._errors import InputError, PolicySkipped
from ._evaluation import compare, evaluate, evaluate_plan, fit, layout, simulate
from ._files import Violation, check, figures, read_load, read_plan, read_trace
from ._homes import choose_homes, read_homes
from ._loads import collect, import_files, pack, synthesize_load, synthesize_trace
from ._planning import plan, start_plan
from ._route_checks import RouteFinding, check_routes

__all__ = [
    "Collector",
    "Copy",
    "Evaluation",
    "GradientReturn",
    "Homes",
    "InputError",
    "Load",
    "Plan",
    "PlanTimes",
    "PolicySkipped",
    "RankTurn",
    "RankTurns",
    "RouteFinding",
    "RunningPlan",
    "Trace",
    "Violation",
    "__version__",
    "batch",
    "check",
    "check_routes",
    "choose_homes",
    "clusters",
    "collect",
    "compare",
    "evaluate",
    "evaluate_plan",
    "figures",
    "fit",
    "import_files",
    "layout",
    "limit_memory",
    "model_parameters",
    "models",
    "pack",
    "plan",
    "policies",
    "read_homes",
    "read_load",
    "read_plan",
    "read_trace",
    "simulate",
    "start_plan",
    "synthesize_load",
    "synthesize_trace",
]
