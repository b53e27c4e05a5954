"""Tests expert-parallel groups: each must equal the same ranks in a file of their own."""

import json
import unittest

import safetensors_file as st
from foremoe_command import DATA, CommandTest

ON = ("--cluster", "h100", "--model", "qwen3-30b-a3b")
MEASURED = {"choice", "plan_seconds", "plan_us_per_layer_micro_step", "placement", "speedup_over_vanilla", "rl_step_speedup"}


def modelled(figures):
    """Returns the figures without those that are measured or compare with another policy's measured time."""
    return {key: value for key, value in figures.items() if key not in MEASURED}


class Groups(CommandTest):
    def wide(self, **options):
        given = {"shape": "qwen3-30b-a3b", "layers": 2, "micro_steps": 3, "ranks": 8, "ranks_per_node": 8, **options}
        words = [word for key, value in given.items() for word in ("--" + key.replace("_", "-"), value)]
        self.succeed("synth", "--out", "job", "--tokens-per-rank", 256, *words)
        return "job"

    def cut_out(self, path, first, count, ranks_per_node):
        """Writes a load of some ranks of a load: the oracle of a group. Returns its path."""
        metadata, tensors = st.read(self.folder / path)
        dtype, (steps, layers, ranks, experts), _ = tensors["load"]
        values = st.values(tensors["load"])
        rows = [
            values[(pair * ranks + first) * experts : (pair * ranks + first + count) * experts]
            for pair in range(steps * layers)
        ]
        data = b"".join(row.tobytes() for row in rows)
        part = {**tensors, "load": (dtype, [steps, layers, count, experts], data)}
        st.write(self.folder / "part", {**metadata, "ranks_per_node": str(ranks_per_node)}, part)
        return "part"

    def test_each_group_is_planned_and_simulated_as_its_ranks_alone(self):
        job = self.wide()
        policies = ("--policy", "vanilla,foremoe")
        for command, on in (("compare", ()), ("simulate", (*ON, "--optimizer-shards", 2))):
            nodes = ("--ranks-per-node", 8)
            whole = self.json_of(command, job, "--ep", 4, *nodes, *policies, *on)
            self.assertEqual([(p["policy"], p["ep"], len(p["groups"])) for p in whole], [("vanilla", 4, 2), ("foremoe", 4, 2)])
            for g in range(2):
                part = self.cut_out(job, 4 * g, 4, 4)
                alone = self.json_of(command, part, "--ranks-per-node", 4, *policies, *on)
                for policy, expected in zip(whole, alone, strict=True):
                    group = policy["groups"][g]
                    self.assertEqual((group.pop("group"), group.pop("first_rank")), (g, 4 * g))
                    with self.subTest(f"{command} {policy['policy']} of group {g}"):
                        self.assertEqual(*(self.without_data_parallelism(one) for one in (group, expected)))

    def without_data_parallelism(self, evaluation):
        """Removes what a group shares with others: gradients and weights of experts, and other parameters' optimizer."""
        left = modelled(evaluation)
        left.pop("memory_bytes_per_rank", None)
        phases = left.pop("phases", [])
        left["parts"] = [{**phase["parts"], "data_parallel": 0} for phase in phases]
        for key in ("step_seconds", "ideal_step_seconds", "rl_step_seconds"):
            if key in left:
                left[key] = round(left[key] - sum(phase["parts"]["data_parallel"] for phase in phases), 12)
        for key in ("fraction_of_ideal", "framework"):
            left.pop(key, None)
        return left

    def test_the_step_is_the_slowest_groups_and_speedups_compare_the_slowest(self):
        job = self.wide(ranks=8, group_spread=1)
        vanilla, ours = self.json_of("simulate", job, "--ep", 2, "--policy", "vanilla,foremoe", *ON)
        for policy in (vanilla, ours):
            seconds = [group["step_seconds"] for group in policy["groups"]]
            self.assertEqual(len(set(seconds)), 4, seconds)
            self.assertEqual(policy["step_seconds"], max(seconds))
            self.assertEqual(policy["slowest_group"], seconds.index(max(seconds)))
            self.assertEqual(policy["memory_bytes_per_rank"], max(g["memory_bytes_per_rank"] for g in policy["groups"]))
        self.assertAlmostEqual(ours["speedup_over_vanilla"], vanilla["step_seconds"] / ours["step_seconds"], places=12)
        text = self.succeed("simulate", job, "--ep", 2, "--policy", "vanilla,foremoe", *ON)
        self.assertIn("4 expert-parallel groups, each 3 micro-steps × 2 layers, 128 experts on 2 ranks", text)
        first = 2 * ours["slowest_group"]
        self.assertIn(f"foremoe: the slowest is group {ours['slowest_group']}, ranks {first}–{first + 1}: ", text)

    def test_figures_of_the_bundled_load_are_those_of_its_groups(self):
        load = DATA / "load-q30-ep64-bursty.safetensors"
        (vanilla,) = self.json_of("compare", load, "--ep", 8, "--policy", "vanilla")
        self.assertEqual((round(vanilla["rho"]["mean"], 4), round(vanilla["rho"]["max"], 4)), (1.6188, 2.5357))
        fit = self.json_of("fit", load, "--ep", 8, *ON, "--policy", "vanilla")
        self.assertEqual(fit["mean_tokens_per_rank"], 2047)  # of 2,048, less rows without a route
        rows = [group["now"]["most_rows"]["rows"] for group in fit["groups"]]
        self.assertEqual(rows[0], 39077)
        self.assertEqual(fit["now"]["most_rows"]["rows"], max(rows))
        group = rows.index(max(rows))
        self.assertEqual(fit["now"]["most_rows"]["rank"], 8 * group + fit["groups"][group]["now"]["most_rows"]["rank"])
        self.assertEqual(len(fit["now"]["ranks"]), 64)
        self.assertEqual(max(rank["bytes"] for rank in fit["now"]["ranks"]), fit["now"]["most_memory"]["bytes"])
        self.assertEqual([rank["rows"] for rank in fit["now"]["ranks"][8:16]],
                         [rank["rows"] for rank in fit["groups"][1]["now"]["ranks"]])

    def test_plans_of_all_groups_verify_and_name_their_group(self):
        job = self.wide(ranks=8, ranks_per_node=4)
        trace = self.synthesise("trace", kind="trace", ranks=4)
        for step, ep, more in (
            (job, 2, ()), (job, 4, ("--in-flight", 2)), (trace, 2, ()), (trace, 1, ("--layers", 1)),
            (trace, 4, ("--ranks", 8, "--tokens-per-rank", 128)), (job, 2, ("--ranks", 4, "--fold")),
        ):  # fmt: skip
            with self.subTest(f"{step} {ep} {more}"):
                figures = self.json_of("plan", step, "--ep", ep, *more, "--out", "plan.safetensors")
                for group in figures["groups"]:
                    path = f"plan-group{group['group']}.safetensors"
                    options = self.json_of("inspect", path)["options"]
                    self.assertEqual((options["ep"], options["group"]), (ep, group["group"]))
                    told = self.succeed("verify", step, path)
                    self.assertIn("is right for", told)
                    self.assertIn(f"ρ mean {group['rho']['mean']:.4f}", told)
        self.assertFalse((self.folder / "plan.safetensors").exists())

    def test_a_plan_of_one_group_is_wrong_for_another(self):
        job = self.wide()
        self.succeed("plan", job, "--ep", 4, "--out", "plan")

        def of_another(metadata, tensors):
            metadata["options"] = json.dumps({**json.loads(metadata["options"]), "group": 1})

        self.succeed("verify", job, "plan-group0")
        self.change("plan-group0", of_another)
        self.assertEqual(self.foremoe("verify", job, "plan-group0").returncode, 1)

        def of_none(metadata, tensors):
            metadata["options"] = json.dumps({**json.loads(metadata["options"]), "group": 7})

        self.change("plan-group0", of_none)
        self.refuse("verify", job, "plan-group0", saying=["2 groups", "no group 7"])

    def test_a_group_runs_and_warms_the_next_step_of_its_group(self):
        step = self.synthesise("trace", kind="trace", ranks=4)
        self.succeed("plan", step, "--ep", 2, "--out", "first.safetensors")
        self.succeed("plan", step, "--ep", 2, "--previous", "first.safetensors", "--out", "second.safetensors")
        small = ("--hidden", 16, "--intermediate", 8, "--repeats", 1)
        self.succeed("run", step, "--plan", "second-group1.safetensors", *small)
        self.refuse("plan", step, "--ep", 2, "--previous", "second", "--out", "third", saying=["second-group0"])

    def test_groups_that_cannot_be_are_refused(self):
        job = self.synthesise(ranks=12, ranks_per_node=8, experts=24)
        for ep, saying in (
            (5, ["--ep", "24 experts", "5 ranks"]), (8, ["--ep: 8", "12 ranks"]), (24, ["--ep: 24", "12 ranks"]),
            (6, ["--ep: 6", "8 ranks", "--ranks-per-node", "6 to 11"]), (0, ["--ep"]),
        ):  # fmt: skip
            with self.subTest(ep):
                self.refuse("compare", job, "--ep", ep, saying=saying)
        self.refuse("compare", self.synthesise(ranks=3, experts=15), "--ep", 2, saying=["15 experts", "--ep"])
        job = self.synthesise(ranks=12, ranks_per_node=8, experts=24)
        self.succeed("compare", job, "--ep", 4, "--policy", "vanilla")
        self.succeed("compare", job, "--ep", 12, "--policy", "vanilla")


if __name__ == "__main__":
    unittest.main()
