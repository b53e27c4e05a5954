"""Tests foremoe run: results equal the reference for every policy, residency, path and communicator."""

import json
import os
import shutil
import subprocess
import unittest

import safetensors_file as st
from foremoe_command import BUNDLED, FOREMOE, ROOT, CommandTest

KEYS = {
    "policy", "phase", "residency", "in_flight", "equal_to_reference", "max_relative_error", "rho_planned", "rho_computed",
    "critical_path_seconds", "critical_path_spread", "critical_path_rows", "compute_seconds_total", "copies", "copy_bytes", "exposed_copy_seconds", "failed_copy_attempts",
    "arena_bytes", "arena_refresh_seconds", "guest_weight_bytes_per_rank", "guest_gradient_bytes_per_rank",
    "guest_bytes_predicted", "gradient_return_bytes", "home_move_bytes", "fallbacks", "step_seconds", "repeats",
    "repeats_equal", "steps", "losses", "output_digest", "result_digest",
}  # fmt: skip
SMALL = ("--hidden", 16, "--intermediate", 8, "--repeats", 2, "--work-flops", 1e4)


class Run(CommandTest):
    def run_json(self, step, *arguments, code=0):
        done = self.foremoe("run", step, *SMALL, *arguments, "--json")
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def assert_right(self, row):
        self.assertLessEqual(KEYS, row.keys())
        self.assertTrue(row["equal_to_reference"], row)
        self.assertTrue(row["repeats_equal"], row)
        self.assertLessEqual(row["max_relative_error"], 1e-5)
        for key in ("rho_planned", "rho_computed"):
            self.assertEqual(row[key].keys(), {"mean", "p99", "max"})
        self.assertEqual(row["copy_bytes"].keys(), {"host_path", "peer_path"})
        self.assertEqual(row["guest_weight_bytes_per_rank"], row["guest_bytes_predicted"]["weights"])
        self.assertEqual(row["guest_gradient_bytes_per_rank"], row["guest_bytes_predicted"]["gradients"])
        self.assertEqual(row["fallbacks"], 0)

    def trace(self, **options):
        return self.synthesise("step.trace.safetensors", kind="trace", tokens_per_rank=48, **options)

    def trace_with_missing_rows(self):
        """Creates a trace. Every fifth token has no route in layer 0; every seventh token has no route in any layer."""
        step = self.trace()

        def without(metadata, tensors):
            dtype, (tokens, layers, k), data = tensors["routed_experts"]
            self.assertEqual(dtype, "U8")
            routes = bytearray(data)
            for token in range(tokens):
                for layer in range(layers):
                    if token % 7 == 3 or (token % 5 == 2 and layer == 0):
                        at = (token * layers + layer) * k
                        routes[at : at + k] = bytes([255]) * k
            tensors["routed_experts"] = (dtype, [tokens, layers, k], bytes(routes))

        self.change(step, without)
        return step


class Results(Run):
    def test_executes_the_bundled_rollout_with_equal_results_and_less_imbalance(self):
        rows = self.run_json(BUNDLED, "--guest-slots", 1, "--policy", "vanilla,foremoe", "--micro-steps", 1, "--layers", 1)
        self.assertEqual(
            [(r["policy"], r["phase"]) for r in rows],
            [(p, s) for p in ("vanilla", "foremoe") for s in ("recompute", "policy_update")])
        for row in rows:
            self.assert_right(row)
        vanilla, planned = rows[1], rows[3]
        self.assertGreater(vanilla["rho_computed"]["mean"], 1.2)
        self.assertLess(planned["rho_computed"]["mean"], 1.05)
        self.assertEqual(vanilla["copies"], 0)
        self.assertGreater(planned["copies"], 0)
        self.assertAlmostEqual(vanilla["losses"][0], planned["losses"][0], delta=1e-5 * vanilla["losses"][0])

    def test_computed_rows_equal_the_plan(self):
        for row in self.run_json(self.trace(), "--policy", "vanilla,static,foremoe"):
            self.assert_right(row)
            self.assertEqual(row["rho_computed"], row["rho_planned"])

    def test_every_residency_path_and_order_equals_the_reference(self):
        step = self.trace()
        for residency in ("static", "resident", "shared", "free"):
            for path in ("auto", "host", "peer"):
                for in_flight in (1, 2):
                    with self.subTest(f"{residency} {path} {in_flight}"):
                        recompute, update = self.run_json(
                            step, "--policy", "foremoe", "--residency", residency, "--path", path, "--in-flight", in_flight)
                        self.assert_right(recompute)
                        self.assertEqual(recompute["residency"], residency)
                        self.assertEqual(recompute["in_flight"], 1)
                        self.assert_right(update)
                        self.assertEqual(update["residency"], "resident" if residency == "free" else residency)
                        self.assertEqual(update["in_flight"], in_flight)
                        other = {"host": "peer_path", "peer": "host_path"}.get(path)
                        if other:
                            self.assertEqual(update["copy_bytes"][other], 0)

    def test_a_free_policy_runs_recompute_and_skips_the_policy_update(self):
        for in_flight in (1, 2):
            recompute, update = self.run_json(self.trace(), "--policy", "eplb", "--in-flight", in_flight)
            self.assert_right(recompute)
            self.assertEqual(recompute["residency"], "free")
            self.assertEqual(update.keys(), {"policy", "phase", "skipped"})
            self.assertEqual(update["phase"], "policy_update")
            self.assertTrue(update["skipped"])

    def test_executes_a_load_without_tokens(self):
        for row in self.run_json(self.synthesise(tokens_per_rank=48)):
            self.assert_right(row)
            self.assertEqual(row["rho_computed"], row["rho_planned"])

    def test_the_router_chooses_experts_for_rows_without_a_route(self):
        step = self.trace_with_missing_rows()
        for residency in ("resident", "shared", "free"):
            for row in self.run_json(step, "--residency", residency, "--steps", 2):
                self.assert_right(row)
                self.assertNotEqual(row["rho_computed"], row["rho_planned"])
        self.assertIn("without a route", self.succeed("run", step, *SMALL))

    def test_home_moves_precede_the_phase(self):
        kept, moved = (self.run_json(self.trace(), "--policy", "foremoe", *rehome)[1] for rehome in ((), ("--rehome", "free")))
        self.assert_right(moved)
        self.assertEqual(kept["home_move_bytes"], 0)
        self.assertGreater(moved["home_move_bytes"], 0)

    def test_losses_decrease_and_do_not_depend_on_balancing(self):
        for optimizer in ("sgd", "adam"):
            rows = self.run_json(self.trace(), "--optimizer", optimizer, "--steps", 4, "--learning-rate", 0.05)
            vanilla, planned = (r["losses"] for r in rows if r["phase"] == "policy_update")
            self.assertEqual(len(vanilla), 4)
            self.assertLess(vanilla[-1], vanilla[0])
            for a, b in zip(vanilla, planned):
                self.assertAlmostEqual(a, b, delta=1e-4 * a)
            self.assertEqual([r["losses"] for r in rows if r["phase"] == "recompute"], [[], []])

    def test_bitwise_makes_outputs_of_all_policies_identical(self):
        step = self.trace_with_missing_rows()
        rows = self.run_json(step, "--bitwise", "--policy", "vanilla,static,foremoe,eplb")
        digests = {row["output_digest"] for row in rows if "skipped" not in row}
        self.assertEqual(len(digests), 1)
        for row in rows:
            if "skipped" not in row:
                self.assertTrue(row["outputs_identical"])
                self.assertGreater(row["bitwise_cost"], 0)

    def test_a_result_that_differs_from_the_reference_causes_exit_code_1(self):
        rows = self.run_json(self.trace(), "--policy", "vanilla", "--learning-rate", 1e4, "--steps", 4, code=1)  # too inaccurate in float32
        self.assertTrue(rows[0]["equal_to_reference"])
        self.assertFalse(rows[1]["equal_to_reference"])

    def test_a_phase_can_run_alone(self):
        step = self.trace()
        both = self.run_json(step, "--policy", "static,eplb")
        for phase in ("recompute", "policy_update"):
            alone = self.run_json(step, "--policy", "static,eplb", "--phase", phase)
            self.assertEqual(*([(r["policy"], r["phase"], r.get("result_digest")) for r in rows if r["phase"] == phase]
                               for rows in (alone, both)))
            self.assertEqual(len(alone), 2)
        self.succeed("plan", step, "--in-flight", 2, "--out", "plan")
        self.refuse("run", step, "--plan", "plan", "--phase", "recompute", saying=["policy update"])

    def test_rejects_a_renamed_option_with_its_new_name(self):
        self.refuse("run", self.trace(), "--stage", "recompute", saying=["--stage is now called --phase"])

    def test_without_a_reference_equality_is_null(self):
        for row in self.run_json(self.trace(), "--no-reference"):
            self.assertLessEqual(KEYS, row.keys())
            self.assertIsNone(row["equal_to_reference"])
            self.assertTrue(row["repeats_equal"])


class Repeatable(Run):
    DIGESTS = ("policy", "phase", "output_digest", "result_digest", "copies", "copy_bytes", "rho_computed", "losses")

    def told(self, rows):
        return [{key: row.get(key) for key in self.DIGESTS} for row in rows]

    def test_a_run_is_bitwise_repeatable(self):
        step = self.trace_with_missing_rows()
        first = self.told(self.run_json(step, "--steps", 2))
        again = ("--steps", 2, "--threads", 1, "--repeats", 3, "--work-ms", 0.2, "--link-throttle", 1e8)
        again = self.foremoe("run", step, "--hidden", 16, "--intermediate", 8, *again, "--json")
        self.assertEqual(first, self.told(json.loads(again.stdout)))
        other_seed = self.told(self.run_json(step, "--steps", 2, "--seed", 7))
        self.assertNotEqual(first[0]["output_digest"], other_seed[0]["output_digest"])

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun here")
    def test_processes_and_threads_compute_the_same_bits(self):
        step = self.trace_with_missing_rows()
        for way in (["--policy", "vanilla,eplb,foremoe", "--timeline", "run.json"],
                    ["--policy", "eplb", "--path", "peer", "--ranks-per-node", 2],
                    ["--residency", "shared", "--in-flight", 2, "--path", "peer", "--rehome", 1, "--steps", 2]):  # fmt: skip
            with self.subTest(way):
                threads = self.run_json(step, *way)
                done = self.mpirun(4, "run", step, *SMALL, *way, "--comm", "mpi", "--json")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertEqual(self.told(threads), self.told(json.loads(done.stdout)))
        self.assertEqual({e["pid"] for e in self.events("run.json")}, {0, 1, 2, 3})

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun here")
    def test_only_one_of_several_processes_reports_an_error(self):
        for arguments, saying in ((["step.load.safetensors"], "4 ranks"), (["absent"], "absent")):
            self.synthesise()
            done = self.mpirun(3, "run", *arguments, "--comm", "mpi")
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertEqual(done.stdout, "")
            told = [line for line in done.stderr.splitlines() if line.startswith("foremoe run:")]
            self.assertEqual(len(told), 1, done.stderr)
            self.assertIn(saying, told[0])

    @unittest.skipUnless(shutil.which("mpirun"), "no mpirun here")
    def test_processes_with_different_arguments_or_inputs_fail_together(self):
        step, other = self.synthesise(), self.synthesise("other.load.safetensors", seed=9)
        for different, saying in (
            ([step, "--prefetch-depth", 3], "--prefetch-depth: 3 on rank 3, 2 on ranks 0, 1, 2"),
            ([step, "--hidden", 16], "--hidden: 16 on rank 3, 64 on ranks 0, 1, 2"),
            ([step, "--bitwise"], "--bitwise: given on rank 3, none on ranks 0, 1, 2"),
            ([step, "--seed", 5], "--seed: 5 on rank 3"),
            ([other], "INPUT: sha256 "),
        ):
            with self.subTest(different):
                mpi = ["--comm", "mpi"]
                done = self.mpirun(3, "run", step, *mpi, ":", "-np", 1, FOREMOE, "run", *different, *mpi)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertEqual(done.stdout, "")
                told = [line for line in done.stderr.splitlines() if line.startswith("foremoe run:")]
                self.assertEqual(len(told), 1, done.stderr)
                self.assertIn(saying, told[0])
        done = self.mpirun(3, "run", step, "--layers", 1, "--repeats", 1, "--threads", 1, "--comm", "mpi",
                           ":", "-np", 1, FOREMOE, "run", step, "--layers", 1, "--repeats", 1, "--comm", "mpi")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)  # the number of threads may differ

    def mpirun(self, processes, *arguments):
        # Suppresses sanitizer findings inside Open MPI.
        known = ROOT / "src" / "foremoe" / "runtime" / "mpi" / "under_mpirun"
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                           OMPI_MCA_btl_vader_single_copy_mechanism="none", ASAN_OPTIONS="fast_unwind_on_malloc=0",
                           LSAN_OPTIONS=f"suppressions={known}/open_mpi_leaks.supp:print_suppressions=0",
                           TSAN_OPTIONS=f"suppressions={known}/open_mpi_races.supp:print_suppressions=0")
        words = ["mpirun", "-np", processes, "--oversubscribe", "--bind-to", "none", FOREMOE, *arguments]
        return subprocess.run([str(w) for w in words], cwd=self.folder, env=environment, capture_output=True, text=True)

    def events(self, path):
        return json.loads((self.folder / path).read_text())["traceEvents"]

    def test_the_timeline_shows_every_rank(self):
        self.run_json(self.trace(), "--policy", "foremoe", "--timeline", "run.json")
        events = self.events("run.json")
        self.assertEqual({e["pid"] for e in events}, {0, 1, 2, 3})
        spans = [e for e in events if e["ph"] == "X"]
        self.assertTrue(all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans))
        names = " ".join(e["name"] for e in spans)
        for word in ("experts, forward", "experts, backward", "work", "plan with foremoe", "policy_update"):
            self.assertIn(word, names)


class GivenPlan(Run):
    def test_executes_a_plan_file(self):
        step = self.trace()
        self.succeed("plan", step, "--guest-slots", 2, "--out", "plan")
        planned = self.run_json(step, "--guest-slots", 2, "--policy", "foremoe")
        given = self.run_json(step, "--plan", "plan")
        for row in given:
            self.assert_right(row)
        self.assertEqual([r["result_digest"] for r in planned], [r["result_digest"] for r in given])

    def test_a_plan_for_other_routes_is_rejected_or_homes_serve_unplanned_rows(self):
        step = self.trace()
        other = self.synthesise("other.trace.safetensors", kind="trace", tokens_per_rank=48, seed=9)
        loads = []
        for trace in (step, other):
            self.succeed("collect", trace, "--out", "load")
            loads.append(st.read(self.folder / "load")[1]["load"])
        (_, shape, _), (_, shape_of_other, _) = loads
        self.assertEqual(shape, shape_of_other)
        ranks, experts = shape[2:]
        planned, executed = map(st.values, loads)
        unknown = 0
        for layer in range(0, len(planned), ranks * experts):
            for e in range(experts):
                a, b = (sum(of[layer + e : layer + ranks * experts : experts]) for of in (planned, executed))
                unknown += max(0, b - a)
        self.assertGreater(unknown, 0)
        for way in (["--guest-slots", 2], ["--guest-slots", 1, "--residency", "shared"], ["--in-flight", 2]):
            with self.subTest(way):
                self.succeed("plan", step, *way, "--out", "plan")
                self.refuse("run", other, "--plan", "plan", saying=["different load"])
                self.refuse("run", other, "--plan", "plan", "--on-mismatch", "refuse", saying=["different load"])
                for row in self.run_json(other, "--plan", "plan", "--on-mismatch", "home"):
                    self.assert_right(row)
                    self.assertEqual(row["mismatched_rows"], unknown)
                for row in self.run_json(step, "--plan", "plan", "--on-mismatch", "home"):
                    self.assert_right(row)
                    self.assertEqual(row["mismatched_rows"], 0)
        self.succeed("plan", step, "--residency", "free", "--out", "plan")
        self.refuse("run", other, "--plan", "plan", "--on-mismatch", "home", saying=["residency free", "no homes"])
        wide = self.synthesise("wide.trace.safetensors", kind="trace", tokens_per_rank=48, experts=32)
        self.succeed("plan", step, "--out", "plan")
        self.refuse("run", wide, "--plan", "plan", "--on-mismatch", "home", saying=["16 experts, the load has 32"])

    def test_a_plan_with_micro_steps_in_flight_runs_the_policy_update_only(self):
        step = self.trace()
        self.succeed("plan", step, "--in-flight", 2, "--out", "plan")
        (update,) = self.run_json(step, "--plan", "plan")
        self.assert_right(update)
        self.assertEqual((update["phase"], update["in_flight"]), ("policy_update", 2))

    def test_a_truncated_input_uses_the_same_part_of_the_plan(self):
        step = self.trace()
        for way in (["--in-flight", 2], ["--rehome", 1], ["--residency", "free"], ["--micro-steps", 2]):
            with self.subTest(way):
                self.succeed("plan", step, *way, "--out", "plan")
                for row in self.run_json(step, "--plan", "plan", "--layers", 1, "--micro-steps", 2):
                    if "skipped" not in row:
                        self.assert_right(row)
        self.succeed("plan", step, "--layers", 1, "--out", "plan")
        self.refuse("run", step, "--plan", "plan", "--path", "peer", "--residency", "shared", saying=["--plan"])

    def test_rejects_a_plan_for_another_input_before_running(self):
        step = self.trace()
        other = self.synthesise("other.load.safetensors", seed=2)
        eight = self.synthesise("eight.load.safetensors", ranks=8)
        self.succeed("plan", step, "--out", "plan")
        self.refuse("run", other, "--plan", "plan", saying=["plan", "load"])
        self.refuse("run", eight, "--plan", "plan", "--ranks", 8, saying=["4 ranks"])
        self.refuse("run", step, "--plan", "plan", "--in-flight", 2, saying=["in flight"])
        self.refuse("run", step, "--plan", "plan", "--policy", "foremoe", saying=["--plan"])
        self.refuse("run", step, "--plan", "plan", "--guest-slots", 2, saying=["--plan"])
        self.refuse("run", step, "--plan", step, saying=["plan"])
        self.refuse("run", step, "--plan", "absent", saying=["absent"])

    def test_rejects_an_invalid_plan(self):
        step = self.trace()
        self.succeed("plan", step, "--out", "plan")

        def swapped(metadata, tensors):
            dtype, shape, _ = tensors["slot_tokens"]
            tokens = st.values(tensors["slot_tokens"])
            at = next(i for i in range(len(tokens) - 1) if tokens[i] != tokens[i + 1])
            tokens[at], tokens[at + 1] = tokens[at + 1], tokens[at]
            tensors["slot_tokens"] = (dtype, shape, tokens.tobytes())

        self.change("plan", swapped)
        self.refuse("run", step, "--plan", "plan", saying=["not right"])


class WrongUsage(Run):
    def test_rejects_invalid_arguments_in_one_line(self):
        step = self.trace()
        self.succeed("plan", step, "--out", "plan")
        for arguments, saying in (
            (["absent"], "absent"),
            (["plan"], "expected a trace or a load"),
            ([step, "--policy", "nobody"], "nobody"),
            ([step, "--comm", "smoke"], "threads or mpi"),
            ([step, "--path", "somewhere"], "auto, host or peer"),
            ([step, "--optimizer", "luck"], "sgd or adam"),
            ([step, "--hidden", 0], "--hidden"),
            ([step, "--repeats", 0], "--repeats"),
            ([step, "--steps", 0], "--steps"),
            ([step, "--timeout", 0], "--timeout"),
            ([step, "--link-throttle", -1], "--link-throttle"),
            ([step, "--prefetch-depth", 0], "--prefetch-depth"),
            ([step, "--work-ms", 1, "--work-flops", 1], "--work"),
            ([step, "--ranks", 3], "3 ranks"),
            ([step, "--timeline", "absent/run.json"], "absent"),
            ([step, "--timeline", step], "--timeline"),
            ([step, "--hidden", 60000, "--intermediate", 60000], "GiB"),
            ([step, "--comm", "mpi", "--ranks", 4], "MPI"),
        ):  # fmt: skip
            with self.subTest(arguments):
                self.refuse("run", *arguments, saying=[saying])

    def test_the_table_explains_its_columns(self):
        text = self.succeed("run", self.trace(), *SMALL, "--policy", "vanilla,eplb,foremoe")
        for words in ("vanilla", "foremoe", "recompute", "policy update", "critical path", "of first", "exposed", "guest memory",
                      "equal", "1 is perfect", "reference", "skipped: "):  # fmt: skip
            self.assertIn(words, text)


if __name__ == "__main__":
    unittest.main()
