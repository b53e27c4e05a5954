"""Tests the outputs of synth, pack, import, collect and inspect."""

import base64
import json
import os
import subprocess
import unittest

import safetensors_file as st
from foremoe_command import BUNDLED, FOREMOE, CommandTest, npy

SHAPES = {
    "Qwen3-30B-A3B": (48, 128, 8), "Qwen3-235B-A22B": (94, 128, 8), "DeepSeek-V3": (58, 256, 8),
    "GLM-4.5-Air": (45, 128, 8), "Kimi-K2": (60, 384, 8), "Mixtral-8x7B": (32, 8, 2), "GPT-32x1.3B": (24, 32, 2),
    "GPT-16x3.2B": (16, 16, 2), "GPT-8x6.7B": (32, 8, 2), "Mixtral-16x2B": (32, 16, 2),
}  # fmt: skip


class Synth(CommandTest):
    def test_every_shape_gives_layers_experts_and_top_k(self):
        for shape, numbers in SHAPES.items():
            with self.subTest(shape):
                made = self.json_of("synth", "--shape", shape.lower(), "--micro-steps", 1, "--ranks", 4, "--tokens-per-rank", 64,
                                    "--out", "x")  # fmt: skip
                self.assertEqual((made["layers"], made["experts"], made["top_k"]), numbers)

    def test_options_override_the_numbers_of_a_shape(self):
        made = self.json_of(
            "synth", "--shape", "Mixtral-8x7B", "--layers", 4, "--micro-steps", 1, "--ranks", 4, "--out", "x"
        )
        self.assertEqual((made["layers"], made["experts"]), (4, 8))

    def test_every_routing_model_generates_all_tokens(self):
        for routing in ("grpo", "zipf", "dirichlet", "w0", "w1", "w2", "w3", "w5", "w6", "w7"):
            with self.subTest(routing):
                step = self.synthesise(routing=routing)
                self.assertEqual(sum(st.values(st.read(self.folder / step)[1]["load"])), 3 * 2 * 4 * 64 * 2)
                trace = self.synthesise("x.trace", routing=routing, kind="trace")
                self.assertEqual(self.json_of("inspect", trace)["tokens"], 3 * 4 * 64)


class Pack(CommandTest):
    def pack(self, trace, *options):
        return self.json_of("pack", trace, "--ranks", 4, "--tokens-per-rank", 64, *options, "--out", "packed")

    def test_packs_every_sequence_once_and_keeps_the_rest_of_the_trace(self):
        trace = self.synthesise("step", kind="trace", sequences_per_rank=4)
        report = self.pack(trace)
        self.assertEqual((report["ranks"], report["mini_batches"]), (4, 1))
        self.assertEqual(report["micro_steps_per_mini_batch"], [report["micro_steps"]])
        (metadata, tensors), (before, recorded) = st.read(self.folder / "packed"), st.read(self.folder / trace)
        micro_step, rank = st.values(tensors.pop("micro_step")), st.values(tensors.pop("rank"))
        order = report["order"]
        self.assertEqual(
            [order[m][r].count(s) for s, (m, r) in enumerate(zip(micro_step, rank, strict=True))], [1] * 48
        )
        self.assertEqual(sum(len(cell) for cells in order for cell in cells), 48)
        self.assertEqual((tensors, metadata), ({name: recorded[name] for name in tensors}, before))

    def test_reports_the_figures_that_other_commands_compute(self):
        trace = self.synthesise("step", kind="trace", sequences_per_rank=4)
        report = self.pack(trace)
        for path, figures in ((trace, report["before"]), ("packed", report["after"])):
            rho = self.json_of("plan", path, "--policy", "vanilla")["rho"]
            self.assertAlmostEqual(figures["rho_mean"], rho["mean"])
            self.assertAlmostEqual(figures["rho_max"], rho["max"])
            _, tensors = st.read(self.folder / path)
            starts = st.values(tensors["cu_seqlens"])
            for name, linear in (("attention", 0), ("dense", 4096)):
                work = {}
                for s, cell in enumerate(
                    zip(st.values(tensors["micro_step"]), st.values(tensors["rank"]), strict=True)
                ):
                    length = starts[s + 1] - starts[s]
                    work[cell] = work.get(cell, 0) + length**2 + linear * length
                busiest = sum(max(work.get((m, r), 0) for r in range(4)) for m in {m for m, _ in work})
                self.assertAlmostEqual(figures[name]["mean"], sum(work.values()) / 4)
                self.assertAlmostEqual(figures[name]["max"], busiest)

    def test_before_is_null_without_a_batching_for_these_ranks(self):
        trace = self.synthesise("step", kind="trace", ranks=2)
        self.assertIsNone(self.pack(trace)["before"])
        self.change(trace, lambda _, tensors: (tensors.pop("micro_step"), tensors.pop("rank")))
        self.assertIsNone(self.pack(trace, "--mini-batches", 2)["before"])
        self.assertNotIn(
            "before", self.succeed("pack", trace, "--ranks", 4, "--tokens-per-rank", 64, "--out", "packed")
        )

    def test_names_the_wrong_option_or_index(self):
        trace = self.synthesise("step", kind="trace")
        load = self.synthesise()
        for arguments, saying in (
            ([trace, "--ranks", 4], ["--tokens-per-rank"]),
            ([trace, "--ranks", 3, "--tokens-per-rank", 64], [trace, "16 experts", "3 ranks", "--ranks"]),
            ([trace, "--ranks", 4, "--tokens-per-rank", 5], [trace, "cu_seqlens[0]", "--tokens-per-rank"]),
            (
                [trace, "--ranks", 4, "--tokens-per-rank", 64, "--mini-batches", 2],
                ["--mini-batches: 2", "3 micro-steps"],
            ),
            ([trace, "--ranks", 4, "--tokens-per-rank", 64, "--mini-batches", 99], ["--mini-batches: 99", "24"]),
            ([trace, "--ranks", 4, "--tokens-per-rank", 64, "--effort", "-1"], ["--effort"]),
            ([load, "--ranks", 4, "--tokens-per-rank", 64], [load, "is a load, expected a trace"]),
        ):
            with self.subTest(arguments):
                self.refuse("pack", *arguments, "--out", "new", saying=saying)


class Import(CommandTest):
    def test_imports_arrays_and_counts_missing_rows(self):
        (self.folder / "a.npy").write_bytes(npy((2, 1, 2), [0, 1, 2, 2]))
        (self.folder / "b.npy").write_bytes(npy((2, 1, 2), [3, 0, 255, 255]))
        report = self.json_of("import", "a.npy", "b.npy", "--experts", 4, "--model", "tiny", "--out", "step")
        self.assertEqual(
            (report["format"], report["kind"], report["sequences"], report["tokens"]), ("npy", "trace", 2, 4)
        )
        self.assertEqual((report["rows"], report["rows_repeating"], report["rows_recorded_missing"]), (4, 1, 1))
        self.assertEqual(report["rows_missing"], 2)
        counted = self.json_of("collect", "step", "--ranks", 2, "--out", "load")
        self.assertEqual((counted["assignments"], counted["rows_missing"]), (4, 2))
        self.assertEqual(self.json_of("inspect", "step")["model"], "tiny")

    def test_commands_remark_on_rows_without_a_route_except_last_ones(self):
        clean, lacking = [0, 1] * 9 + [255, 255], [255, 255] * 4 + [0, 1] * 5 + [255, 255]
        for name, rows in (("clean", clean), ("lacking", lacking)):
            (self.folder / f"{name}.npy").write_bytes(npy((10, 1, 2), rows))
            self.succeed("import", f"{name}.npy", "--experts", 4, "--out", name)
        for command in (["collect", "--out", "load"], ["compare"], ["plan", "--out", "plan"], ["inspect"],
                        ["pack", "--tokens-per-rank", 100, "--out", "packed"]):  # fmt: skip
            for name in ("clean", "lacking"):
                ranks = [] if command[0] == "inspect" else ["--ranks", 1]
                done = self.foremoe(command[0], name, *ranks, *command[1:])
                remark = f"{name}: 40 % of the rows (4 of 10) have no route and do not count; 1 sequences lack their first"
                self.assertEqual(remark in done.stderr, name == "lacking", done.stderr)
                self.assertEqual("no route and do not count" in done.stderr, name == "lacking", done.stderr)

    def test_reports_missing_rows_as_text(self):
        (self.folder / "a.npy").write_bytes(npy((2, 1, 2), [0, 1, 2, 2]))
        self.assertIn("1 of 2 rows have no route", self.succeed("import", "a.npy", "--out", "step"))

    def test_detects_formats_that_require_the_python_package(self):
        (self.folder / "a").write_bytes(base64.b64encode(npy((1, 1, 2), [0, 1])))
        self.refuse(
            "import", "a", "--out", "new", saying=["a: is a npy-base64 file, which requires the Python package"]
        )
        self.refuse("import", "a", "--format", "npz", "--out", "new", saying=["a: is a npz file"])

    def test_a_known_model_sets_the_number_of_experts(self):
        (self.folder / "a.npy").write_bytes(npy((1, 32, 2), [0, 1] * 32))
        report = self.json_of("import", "a.npy", "--model", "Mixtral-8x7B", "--out", "step")
        self.assertEqual((report["experts"], report["experts_inferred"]), (8, False))
        self.refuse("import", "a.npy", "--model", "Qwen3-30B-A3B", "--out", "new", saying=["a.npy", "Qwen3-30B-A3B"])

    def test_rejects_invalid_imports_with_a_reason(self):
        (self.folder / "a.npy").write_bytes(npy((1, 1, 2), [0, 1]))
        (self.folder / "empty.npy").write_bytes(npy((0, 1, 2), []))
        self.succeed("import", "a.npy", "--out", "step")
        self.refuse("import", "step", "--out", "new", saying=["step", "foremoe.trace/1", "already"])
        self.refuse("import", "empty.npy", "--out", "new", saying=["empty.npy", "no tokens"])

    def test_a_pipe_without_a_writer_is_empty(self):
        os.mkfifo(self.folder / "pipe")
        done = self.foremoe("import", "pipe", "--out", "new")
        self.assertEqual(done.returncode, 2)
        self.assertIn("pipe: is empty", done.stderr)
        self.assertIn("pipe: is a pipe, not a regular file", self.foremoe("inspect", "pipe").stderr)


class Collect(CommandTest):
    def test_counts_match_the_routes(self):
        routes = [0, 1, 1, 2, 3, 0, 255, 255]  # four tokens, one layer, top-2; the last token has no route
        tensors = {
            "routed_experts": st.tensor("U8", [4, 1, 2], routes),
            "cu_seqlens": st.tensor("I64", [3], [0, 2, 4]),
            "micro_step": st.tensor("I32", [2], [0, 0]),
            "rank": st.tensor("I32", [2], [0, 1]),
        }
        st.write(self.folder / "step", {"format": "foremoe.trace/1", "num_experts": "4", "top_k": "2"}, tensors)
        counted = self.json_of("collect", "step", "--out", "load")
        self.assertEqual((counted["assignments"], counted["rows_missing"]), (6, 1))
        metadata, tensors = st.read(self.folder / "load")
        self.assertEqual(tensors["load"][1], [1, 1, 2, 4])
        self.assertEqual(list(st.values(tensors["load"])), [1, 2, 1, 0, 1, 0, 0, 1])
        self.assertEqual((metadata["format"], metadata["num_experts"]), ("foremoe.load/1", "4"))

    def test_counts_a_rollout_while_it_writes_traces(self):
        for i in range(3):
            self.synthesise(f"{i}.safetensors", kind="trace", seed=i)
        (self.folder / "rollout").mkdir()
        following = subprocess.Popen([FOREMOE, "collect", "--follow", "rollout", "--ranks", "2", "--out", "load", "--json"],
                                     cwd=self.folder, stdout=subprocess.PIPE, text=True)  # fmt: skip
        self.addCleanup(following.kill)
        for i in (1, 2, 0):
            (self.folder / f"{i}.safetensors").rename(self.folder / "rollout" / f"{i}.safetensors")
        (self.folder / "rollout" / "done").touch()
        told = json.loads(following.communicate()[0])
        self.assertEqual([file["name"] for file in told["files"]], ["0.safetensors", "1.safetensors", "2.safetensors"])
        self.assertEqual(told["tokens"], sum(file["tokens"] for file in told["files"]))
        _, tensors = st.read(self.folder / "load")
        self.assertEqual(sum(st.values(tensors["load"])), told["assignments"])
        self.succeed("collect", "rollout", "--follow", "--ranks", 2, "--out", "again")  # the rollout has already ended
        self.assertEqual((self.folder / "again").read_bytes(), (self.folder / "load").read_bytes())

    def test_follow_requires_a_folder_and_the_expected_sequences(self):
        self.synthesise("0.safetensors", kind="trace")
        self.refuse("collect", "0.safetensors", "--follow", "--out", "new", saying=["0.safetensors", "folder"])
        self.refuse("collect", "absent", "--follow", "--out", "new", saying=["absent"])
        self.refuse("collect", "0.safetensors", "--sequences", 3, "--out", "new", saying=["--sequences", "--follow"])
        self.refuse("collect", "--follow", ".", "--sequences", 1, "--ranks", 2, "--out", "new", saying=["expected 1"])


class Inspect(CommandTest):
    def test_reports_the_memory_of_routes_for_a_trace_and_its_load(self):
        trace = self.synthesise(
            "x.trace", kind="trace"
        )  # 3 micro-steps of 4 × 64 tokens, 2 layers, top-2, one byte per id
        self.succeed("collect", trace, "--out", "x.load")
        for name in (trace, "x.load"):
            self.assertEqual(self.json_of("inspect", name)["route_bytes"], 3 * 4 * 64 * 2 * 2)
            self.assertIn("its routes: 0.0 MB", self.succeed("inspect", name))

    def test_verls_violations_of_a_known_load(self):
        values = [10, 20, 30, 0, 0, 0, 0, 100]  # two ranks, four experts, one micro-step, one layer
        st.write(self.folder / "load", {"format": "foremoe.load/1", "num_experts": "4", "top_k": "1", "ranks_per_node": "2"},
                 {"load": st.tensor("I32", [1, 1, 2, 4], values)})  # fmt: skip
        (layer,) = self.json_of("inspect", "load")["layer_statistics"]
        self.assertAlmostEqual(layer["step"]["max_vio"], 100 / 40 - 1)
        self.assertAlmostEqual(layer["step"]["min_vio"], 10 / 40 - 1)
        self.assertAlmostEqual(layer["step"]["avg_vio"], (30 + 20 + 10 + 60) / 4 / 40)
        self.assertAlmostEqual(layer["rho"]["step"], 130 / 80)
        self.assertEqual(layer["micro_step_rho"], [130 / 80])

    def test_the_picture_has_a_row_per_micro_step_and_a_bar_per_rank_without_colour_in_a_pipe(self):
        text = self.succeed("inspect", self.synthesise(), "--layer", 1)
        self.assertIn("Layer 1", text)
        self.assertNotIn("\x1b", text)
        rows = [line.split("  ρ")[0].rstrip() for line in text.splitlines() if line.startswith("  micro-step ")]
        self.assertEqual(len(rows), 3)
        for row in rows:
            self.assertRegex(row, "[▁▂▃▄▅▆▇█]{4}$")
        self.assertRegex(text, r"whole step +[▁▂▃▄▅▆▇█]{4}  ρ \d\.\d\d")

    def test_colours_a_terminal_unless_disabled(self):
        step = self.synthesise()
        self.assertIn("\x1b[38;5;", self.on_a_terminal(["inspect", step]))
        self.assertNotIn("\x1b", self.on_a_terminal(["inspect", step], NO_COLOR="1"))
        self.assertNotIn("\x1b", self.on_a_terminal(["inspect", step], TERM="dumb"))

    def test_shows_a_trace_without_batching(self):
        tensors = {
            "routed_experts": st.tensor("U8", [2, 1, 2], [0, 1, 2, 3]),
            "cu_seqlens": st.tensor("I64", [2], [0, 2]),
        }
        st.write(self.folder / "step", {"format": "foremoe.trace/1", "num_experts": "4", "top_k": "2"}, tensors)
        done = self.foremoe("inspect", "step", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no batching recorded", done.stderr)
        self.assertEqual(json.loads(done.stdout)["sequences"], 1)

    def test_shows_the_loads_of_a_plan(self):
        before = self.json_of("inspect", BUNDLED)["layer_statistics"]
        self.succeed("plan", BUNDLED, "--guest-slots", 2, "--out", "plan")
        seen = self.json_of("inspect", "plan")
        self.assertEqual((seen["kind"], seen["policy"], seen["guest_slots"]), ("plan", "foremoe", 2))
        for was, now in zip(before, seen["layer_statistics"]):
            self.assertLess(now["rho"]["mean"], was["rho"]["mean"])
        self.assertIn("copies per event", self.succeed("inspect", "plan"))


if __name__ == "__main__":
    unittest.main()
