"""Tests foremoe layout: its seconds of one stage equal those of simulate, and what it recommends fits."""

import json
import unittest

from foremoe_command import CommandTest


class Layout(CommandTest):
    def setUp(self):
        super().setUp()
        (self.folder / "small.json").write_text(json.dumps({
            "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128,
            "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 1000, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}))  # fmt: skip
        self.on = ("--cluster", "h100", "--model", "small.json")
        self.load = self.synthesise(ranks=8, ranks_per_node=8)
        self.trace = self.synthesise("step.trace.safetensors", kind="trace", ranks=8, tokens_per_rank=256)

    def layout(self, step, *more, gpus=8):
        return self.json_of("layout", step, "--gpus", gpus, *self.on, *more)

    def test_seconds_and_memory_of_one_stage_are_those_of_simulate(self):
        for step in (self.load, self.trace):
            found = self.layout(step)
            self.assertEqual([one["ep"] for one in found["layouts"] if one["stages"] == 1], [1, 2, 4, 8])
            for one in found["layouts"]:
                if one["stages"] > 1:
                    continue
                with self.subTest(f"{step} {one['ep']}"):
                    (vanilla,) = self.json_of("simulate", step, "--ep", one["ep"], *self.on, "--policy", "vanilla")
                    self.assertAlmostEqual(one["unplanned"]["seconds"], vanilla["step_seconds"], delta=1e-12)
                    self.assertEqual(one["unplanned"]["memory_bytes"], vanilla["memory_bytes_per_rank"])

    def test_all_layouts_have_the_same_tokens_and_the_best_is_the_fastest_that_fits(self):
        found = self.layout(self.trace)
        steps = []
        for one in found["layouts"]:
            self.assertEqual(one["ep"] * one["stages"] * one["groups"], 8)
            self.assertEqual(one["micro_steps"], 3 * one["stages"])
            self.assertEqual(one["planned"] is None, one["not_planned"] != "")
            for kind in ("unplanned", "planned"):
                if one[kind] and one[kind]["fits"]:
                    steps.append((one[kind]["seconds"], one["ep"], one["stages"], kind == "planned"))
        best = found["best"]
        self.assertEqual(min(steps), (best["seconds"], best["ep"], best["stages"], best["planned"]))
        unplanned = found["best_unplanned"]
        self.assertEqual(min(step for step in steps if not step[3])[:3],
                         (unplanned["seconds"], unplanned["ep"], unplanned["stages"]))  # fmt: skip

    def test_threads_do_not_change_the_result(self):
        self.assertEqual(self.layout(self.trace, "--threads", 1), self.layout(self.trace, "--threads", 2))

    def test_stages_of_an_input_with_all_layers_have_their_own_layers(self):
        whole = self.synthesise("whole", layers=4, ranks=4, ranks_per_node=4, tokens_per_rank=512)
        part = self.synthesise("part", layers=2, ranks=4, ranks_per_node=4, tokens_per_rank=512)
        self.assertNotIn("represent", self.layout(whole, gpus=4)["remarks"][-1])
        self.assertIn("2 of the model's 4 MoE layers", self.layout(part, gpus=4)["remarks"][-1])

    def test_text_recommends_a_layout_with_its_options_and_what_is_not_modelled(self):
        text = self.succeed("layout", self.trace, "--gpus", 8, *self.on)
        best = self.layout(self.trace)["best"]
        for words in (f"Recommended: EP {best['ep']} with {best['stages']} stage", "s per step",
                      f"--expert-model-parallel-size {best['ep']} --pipeline-model-parallel-size {best['stages']}",
                      "ForeMoE: ", "Tensor and context parallelism", "synthetic", "2 of the model's 4 MoE layers"):  # fmt: skip
            self.assertIn(words, text)

    def test_a_trace_is_batched_for_the_gpus(self):
        found = self.layout(self.trace, "--tokens-per-rank", 256, gpus=4)
        self.assertEqual((found["gpus"], {one["micro_steps"] // one["stages"] for one in found["layouts"]}), (4, {6}))

    def test_wrong_input_is_refused(self):
        self.refuse("layout", self.load, "--gpus", 8, saying=["--cluster"])
        self.refuse("layout", self.load, *self.on, saying=["--gpus"])
        self.refuse("layout", self.load, "--gpus", 16, *self.on, saying=["--gpus: 16", "8 ranks", "--gpus 8"])
        self.refuse(
            "layout", self.load, "--gpus", 8, "--ranks-per-node", 3, *self.on, saying=["--gpus: 8", "of a node"]
        )
        self.refuse("layout", self.load, "--gpus", 8, *self.on, "--memory-budget", 0.001,
                    saying=["--gpus", "no layout of 8 GPUs", "the least is"])  # fmt: skip


if __name__ == "__main__":
    unittest.main()
