"""Wrong input causes exit code 2 and one line on stderr with file, field and index. No file is written."""

import array
import json
import os
import pathlib
import re
import struct
import subprocess
import unittest

import safetensors_file as st
from foremoe_command import FOREMOE, SUBCOMMANDS, CommandTest, npy


class WrongUsage(CommandTest):
    def test_rejects_missing_and_unknown_subcommands_and_unknown_options(self):
        self.refuse(saying=["subcommand"])
        self.refuse("balance", saying=["balance"])
        for name in SUBCOMMANDS:
            with self.subTest(name):
                self.refuse(name, "--no-such-option", saying=[f"foremoe {name}"])

    def test_a_misspelt_option_or_subcommand_is_named_with_the_nearest_one(self):
        self.refuse("plan", "--guest-slot", 2, "x", saying=["'--guest-slot' is not an option; did you mean --guest-slots?"])
        self.refuse("plan", "x", "--polcy=vanilla", saying=["'--polcy' is not an option; did you mean --policy?"])
        self.refuse("simulat", "x", saying=["'simulat' is not a subcommand; did you mean simulate?"])
        self.refuse("plna", saying=["'plna' is not a subcommand; did you mean plan?"])
        self.refuse("--versoin", saying=["'--versoin' is not an option that can precede a subcommand; did you mean --version?"])
        self.refuse("--threads", 2, "plan", "x", saying=["'--threads' is not an option that can precede a subcommand"])
        self.refuse("verify", "a", "b", "c", saying=["unexpected argument 'c'"])
        self.assertNotIn("mean", self.foremoe("plan", "x", "--frobnicate").stderr)

    def test_every_subcommand_suggests_its_own_options(self):
        for command in SUBCOMMANDS:
            with self.subTest(command):
                options = re.findall(r"^  (?:-\w,)?(--[a-z-]+)", self.succeed(command, "--help-all"), re.MULTILINE)
                longest = max(options, key=len)
                self.refuse(command, longest[:-1], saying=[f"'{longest[:-1]}' is not an option; did you mean {longest}?"])

    def test_a_misspelt_value_is_named_with_the_nearest_one(self):
        step = self.synthesise()
        for option, value, near in (
            ("--prefer", "lnks", "--prefer: 'lnks', expected balance, links or time; did you mean links?"),
            ("--residency", "sahred", "did you mean shared?"),
            ("--rehome", "fre", "nor free; did you mean free?"),
            ("--policy", "relbra", "did you mean relibra?"),
            ("--cluster", "h10", "did you mean h100?"),
            ("--model", "qwen3-30b", "did you mean Qwen3-30B-A3B?"),
            ("--policy-option", "perod=3", "did you mean period?"),
        ):
            with self.subTest(option=option):
                policy = ["--policy", "eplb-ema"] if option == "--policy-option" else []
                self.refuse("plan", step, option, value, *policy, saying=[near])
        self.refuse("synth", "--shape", "qwen3-30b", "--out", "y", saying=["did you mean Qwen3-30B-A3B?"])
        self.assertNotIn("mean", self.foremoe("plan", step, "--prefer", "speed").stderr)

    def test_missing_arguments(self):
        for arguments, missing in (
            (["synth"], "--out"),
            (["import", "--out", "x"], "FILE"),
            (["import", "x"], "--out"),
            (["collect", "x"], "--out"),
            (["pack", "x", "--ranks", "2", "--out", "y"], "--tokens-per-rank"),
            (["inspect"], "INPUT"),
            (["plan"], "INPUT"),
            (["verify", "x"], "PLAN"),
            (["compare"], "INPUT"),
            (["plan", "x", "--guest-slots"], "--guest-slots"),
        ):
            with self.subTest(arguments):
                self.refuse(*arguments, saying=[missing])

    def test_rejects_invalid_values(self):
        step = self.synthesise()
        for option, value in (
            ("--guest-slots", "-1"), ("--guest-slots", "two"), ("--guest-slots", "1.5"), ("--guest-slots", "99999999999"),
            ("--ranks", "0"), ("--ranks", "-4"), ("--ranks-per-node", "0"), ("--tokens-per-rank", "0"), ("--layers", "0"),
            ("--residency", "elastic"), ("--rehome", "-1"), ("--rehome", "some"), ("--in-flight", "0"), ("--stages", "BX"),
            ("--stages", "BB"), ("--prefer", "both"), ("--tolerance", "-0.1"), ("--tolerance", "nan"),
            ("--max-copies-per-rank", "-1"), ("--max-copies-per-source", "many"), ("--min-tokens-per-guest", "-1"),
            ("--seed", "x"), ("--threads", "0"), ("--align", "0"), ("--policy", "magic"),
            ("--policy", "all"),
        ):  # fmt: skip
            with self.subTest(option=option, value=value):
                self.refuse("plan", step, "--out", "plan.safetensors", option, value, saying=[option])
        self.refuse("compare", step, "--policy", "vanilla,magic", saying=["--policy", "magic", "vanilla"])

    def test_rejects_more_layers_or_micro_steps_than_there_are(self):
        step = self.synthesise(layers=2, micro_steps=3)
        self.succeed("plan", step, "--out", "plan")
        on = ("--cluster", "h100", "--model", "Qwen3-30B-A3B")
        for command in (["plan"], ["fit", *on], ["inspect"], ["simulate", *on], ["compare"], ["run"], ["verify", "plan"],
                        ["run", "--plan", "plan"]):  # fmt: skip
            for option, value, most in (("--layers", 3, 2), ("--micro-steps", 4, 3)):
                with self.subTest(command=command, option=option):
                    file = "plan" if "--plan" in command else step
                    self.refuse(command[0], step, *command[1:], option, value,
                                saying=[f"{option}: {value}, but {file} has only {most}"])  # fmt: skip

    def test_rejects_invalid_policy_options(self):
        step = self.synthesise()
        for policy, given, why in (
            ("eplb-ema", "alpha", "--policy-option: alpha: expected NAME=VALUE"),
            ("eplb-ema", "alpha=2", "--policy-option: alpha: 2 is not above 0, at most 1"),
            ("eplb-ema", "threshold=2", "--policy-option: threshold: policy eplb-ema has alpha, period"),
            ("foremoe", "alpha=1", "--policy-option: alpha: policy foremoe has no options of its own"),
            ("finemoe", "solver=highs", "--policy-option: solver: 'highs', expected lp or exact"),
        ):
            with self.subTest(given, policy=policy):
                for command in ("plan", "compare"):
                    self.refuse(command, step, "--policy", policy, "--policy-option", given, saying=[why])
        several = [f"--policy-option={given}" for given in ("solver=exact", "alpha_ranks=1", "foo=1")]
        self.refuse("plan", step, "--policy", "finemoe", *several, saying=["--policy-option: foo: policy finemoe has"])

    def test_rejects_numbers_that_are_not_finite_or_out_of_range(self):
        on = ("--cluster", "h100", "--model", "qwen3-30b-a3b")
        for command in ("simulate", "plan"):
            for value, why in (("-5", "-5 is not above 0"), ("0", "0 is not above 0"), ("nan", "'nan' is not a number"),
                               ("inf", "inf is not above 0, at most 1e+09"), ("1e10", "at most 1e+09"),
                               ("x", "'x' is not a number")):  # fmt: skip
                with self.subTest(command, value=value):
                    out = [] if command == "simulate" else ["--out", "p"]
                    self.refuse(command, "x", *on, f"--memory-budget={value}", *out, saying=["--memory-budget: ", why])
        self.refuse("simulate", "x", *on, "--rollout-seconds=nan", saying=["--rollout-seconds: 'nan' is not a number"])
        self.refuse("simulate", "x", *on, "--rollout-seconds=-1", saying=["--rollout-seconds: -1 is not in 0 … 1e+09"])
        self.refuse("verify", "x", "y", "--max-listed=-1", saying=["--max-listed: -1 is not in 0 … 2147483647"])
        for command in ("simulate", "plan", "verify"):
            self.assertNotRegex(self.succeed(command, "--help"), "POSITIVE|NONNEGATIVE")

    def test_repeats_an_out_of_range_number_with_the_range(self):
        step = self.synthesise()
        for option, value, why in (
            ("--guest-slots", "-1", "-1 is not in 0 … 65536"),
            ("--guest-slots", "9" * 20, "9" * 20 + " is not in 0 … 65536"),
            ("--seed", "-1", "-1 is not in 0 … 18446744073709551615"),
            ("--seed", str(2**64), f"{2**64} is not in 0 … 18446744073709551615"),
            ("--tolerance", "2", "2 is not in 0 … 1"),
            ("--rehome", "-1", "-1 is not in 0 … "),
        ):
            with self.subTest(option=option, value=value):
                self.refuse("plan", step, option, value, saying=[f"{option}: {why}"])
        self.succeed("plan", step, "--seed", 2**64 - 1)

    def test_rejects_batching_options_for_a_load(self):
        load, trace = self.synthesise(), self.synthesise("step.trace.safetensors", kind="trace")
        for command in ("plan", "compare"):
            self.refuse(command, load, "--tokens-per-rank", 32, saying=[f"--tokens-per-rank: applies only to traces, but {load}"])
            self.succeed(command, trace, "--ranks", 2, "--tokens-per-rank", 64, "--previous-load", trace)

    def test_rejects_an_empty_name(self):
        step = self.synthesise()
        for command, option in (("plan", "--out"), ("plan", "--homes"), ("compare", "--previous"), ("run", "--timeline"),
                                ("compare", "--policy"), ("run", "--policy")):
            with self.subTest(command, option=option):
                self.refuse(command, step, option, "", saying=[f"{option}: is empty"])

    def test_rejects_an_unsupported_residency_of_a_single_policy(self):
        step = self.synthesise()
        for command in ("plan", "compare"):
            self.refuse(command, step, "--policy", "eplb", "--residency", "resident",
                        saying=["--residency", "policy eplb plans residency free, not resident"])  # fmt: skip
        done = self.foremoe("compare", step, "--policy", "eplb,foremoe", "--residency", "resident")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_rejects_launches_of_several_processes(self):
        step = self.synthesise()
        mpirun = {"OMPI_COMM_WORLD_SIZE": "4"}
        srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "3"}
        for command, launcher in (
            (["plan", step, "--out", "p"], srun), (["compare", step], mpirun), (["synth", "--out", "q"], mpirun),
            (["run", step], mpirun),
        ):  # fmt: skip
            with self.subTest(command):
                done = self.launched(launcher, *command)
                self.assertEqual(done.returncode, 2, done.stdout)
                self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
                self.assertIn("mpirun or srun has started 4 processes", done.stderr)
                self.assertIn("foremoe run --comm mpi", done.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.folder, "p")))

    def test_several_processes_can_run_commands_that_only_read(self):
        step = self.synthesise()
        for command in (["inspect", step], ["options"], ["--version"], ["plan", "--help"]):
            with self.subTest(command):
                done = self.launched({"OMPI_COMM_WORLD_SIZE": "4"}, *command)
                self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_slurm_batch_script_counts_as_one_process(self):
        done = self.launched({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "plan", self.synthesise(), "--out", "p")
        self.assertEqual(done.returncode, 0, done.stderr)

    def launched(self, launcher, *command):
        """Runs foremoe with the environment variables of a launcher."""
        return subprocess.run([FOREMOE, *command], cwd=self.folder, capture_output=True, text=True,
                              env={**os.environ, **launcher})  # fmt: skip

    def test_plan_rejects_a_budget_without_residency_auto(self):
        step = self.synthesise()
        self.refuse("plan", step, "--memory-budget", 30, "--out", "p", saying=["--memory-budget", "--residency auto"])

    def test_residency_free_is_limited_to_forward_only_phases(self):
        self.refuse("plan", self.synthesise(), "--residency", "free", "--in-flight", 2, "--out", "p", saying=["free"])

    def test_synthesis_names_an_invalid_option(self):
        for option, value in (
            ("--top-k", 200), ("--ranks", 0), ("--experts", 0), ("--shape", "GPT-2"), ("--routing", "fair"),
            ("--kind", "plan"), ("--layout", "random"), ("--skew", -1), ("--micro-steps", 10**8),
        ):  # fmt: skip
            with self.subTest(option):
                self.refuse("synth", "--out", "x.safetensors", option, value, saying=[option])
        text = " ".join(self.succeed("options").split())
        for option, most in (("--layers", 2**20), ("--experts", 2**16 - 1), ("--micro-steps", 2**20), ("--ranks", 2**16)):
            self.refuse("synth", "--out", "x", option, most + 1, saying=[f"{option}: {most + 1} is not in 1 … {most}"])
            self.assertIn(f"{option} integer 1 … {most}", text)
        self.refuse("synth", "--out", "x", "--routing", "w1", "--ranks", 3, saying=["--experts", "3 ranks"])


class WrongFiles(CommandTest):
    def setUp(self):
        super().setUp()
        self.step = self.synthesise()
        self.trace = self.synthesise("step.trace.safetensors", kind="trace")
        self.succeed("plan", self.step, "--out", "plan.safetensors")

    def for_every_reader(self, path, saying):
        """Expects that each command that reads a trace or a load rejects this file with the same message."""
        for arguments in (["inspect", path], ["plan", path, "--out", "new"], ["compare", path], ["verify", path, "plan.safetensors"],
                          ["collect", path, "--out", "new"]):  # fmt: skip
            with self.subTest(arguments):
                self.refuse(*arguments, saying=[str(path), *saying])

    def test_rejects_a_missing_file(self):
        self.for_every_reader("nowhere.safetensors", ["No such file"])
        self.refuse("verify", self.step, "nowhere.safetensors", saying=["nowhere.safetensors", "No such file"])
        self.refuse("import", "nowhere.npy", "--out", "new", saying=["nowhere.npy", "No such file"])
        for option in ("--homes", "--previous", "--previous-load"):
            self.refuse("plan", self.step, option, "nowhere.safetensors", "--out", "new", saying=["nowhere.safetensors"])

    def test_rejects_a_folder(self):
        self.for_every_reader(".", [])

    def test_rejects_a_file_that_is_not_safetensors(self):
        unknown = ["is not a safetensors file", "foremoe import"]
        advice = "Convert it with: foremoe import {} --out trace.safetensors"
        for name, data, saying in (
            ("empty", b"", ["is empty"]),
            ("short", b"\x01\x02", unknown),
            ("text", b"routes? which routes?", unknown),
            ("long", b"\xff" * 64, unknown),
            ("a.npy", npy((1, 1, 2), [0, 1]), ["is a npy file", advice]),
            ("a.npz", b"PK\x03\x04" + b"\0" * 40, ["is a npz file", advice]),
            ("a.pt", b"PK\x03\x04" + b"\0" * 22 + b"\x0a\0\0\0x/data.pkl", ["is a torch file", advice]),
            ("a.json", b'{"routed_experts": []}', ["is a json file", advice]),
            ("dump.json", b'{"logical_count": []}', ["is a counts file", "foremoe import dump.json --ranks R --top-k K --out load"]),
            ("config.json", b'{"model_type": "qwen3_moe"}', ["is a model's config.json, which simulate, fit and compare read as", "model"]),
            ("map.json", b'{"physical_to_logical_map": []}', ["is a map for an engine, without counts"]),
            ("a.toml", b'name = "h100"', ["is a TOML file; simulate, fit and compare read that of a cluster as", "cluster"]),
        ):  # fmt: skip
            (self.folder / name).write_bytes(data)
            with self.subTest(name):
                self.for_every_reader(name, [word.format(name) for word in saying])
                self.refuse("plan", self.step, "--homes", name, "--out", "new", saying=[name, saying[0]])
                self.refuse("verify", self.step, name, saying=[name])

    def test_rejects_a_truncated_file(self):
        data = (self.folder / self.step).read_bytes()
        (self.folder / "cut").write_bytes(data[:-1])
        self.for_every_reader("cut", ["load"])

    def test_a_large_file_that_is_truncated_while_it_is_read_is_an_error(self):
        tokens = 1 << 30
        path = self.folder / "large"
        st.write(path, {"format": "foremoe.trace/1", "num_experts": "4", "top_k": "1", "layer_ids": "[0]"}, {})
        head, lengths = path.read_bytes()[8:].rstrip(), array.array("q", [0, tokens]).tobytes()
        shapes = {"cu_seqlens": ("I64", [2], len(lengths)), "routed_experts": ("U8", [tokens, 1, 1], tokens)}
        header, end = json.loads(head), 0
        for name, (dtype, shape, size) in shapes.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + size]}
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + lengths)
        os.truncate(path, 8 + len(text) + end)  # sparse: expert 0 for all tokens
        out = self.folder / "new"
        command = [FOREMOE, "collect", path, "--ranks", "1", "--tokens-per-rank", str(tokens), "--out", out]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            while str(path) not in pathlib.Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
                pass
            os.truncate(path, 4096)
            self.assertIn("truncated while it was read", process.communicate()[1])
        self.assertEqual(process.returncode, 2)
        self.assertFalse(out.exists())

    def test_rejects_a_file_of_another_kind(self):
        is_plan = "plan.safetensors: is a plan, expected a trace or a load. Give the trace or load that it plans"
        self.refuse("plan", "plan.safetensors", "--out", "new", saying=[is_plan])
        self.refuse("compare", "plan.safetensors", saying=[is_plan])
        self.refuse("verify", "plan.safetensors", "plan.safetensors", saying=[is_plan])
        self.refuse("collect", self.step, "--out", "new", saying=[f"{self.step}: is a load, expected a trace", "no routes"])
        for path, kind in ((self.step, "a load"), (self.trace, "a trace")):
            saying = [f"{path}: is {kind}, expected a plan. Plan it with: foremoe plan {path} --out plan.safetensors"]
            self.refuse("verify", self.step, path, saying=saying)
            self.refuse("plan", self.step, "--previous", path, "--out", "new", saying=saying)
            saying = [f"{path}: is {kind}, expected homes or a plan. Choose homes", "foremoe homes"]
            self.refuse("plan", self.step, "--homes", path, "--out", "new", saying=saying)
        self.refuse("simulate", self.step, "--cluster", self.step, saying=["--cluster: ", "is no TOML file of a cluster"])
        self.refuse("fit", self.step, "--cluster", "h100", "--model", self.step, saying=["--model: ", "is no config.json"])
        self.succeed("homes", self.trace, "--out", "homes.safetensors")
        self.refuse("compare", "homes.safetensors", saying=["is homes, expected a trace or a load", "--homes"])
        self.change(self.step, lambda metadata, tensors: metadata.update(format="foremoe.load/7"))
        self.refuse("plan", self.step, "--out", "new", saying=[self.step, "format", "foremoe.load/7"])

    def test_a_negative_load_is_named_by_its_index(self):
        def negative(metadata, tensors):
            _, shape, _ = tensors["load"]
            values = list(st.values(tensors["load"]))
            values[-1] = -5
            tensors["load"] = st.tensor("I64", shape, values)

        self.change(self.step, negative)
        self.refuse("plan", self.step, "--out", "new", saying=[self.step, "load[2, 1, 3, 15]", "-5"])

    def test_a_route_that_repeats_an_expert_is_named_by_its_index(self):
        def repeat(metadata, tensors):
            dtype, shape, data = tensors["routed_experts"]
            data = bytearray(data)
            row = 7 * 2 + 1  # token 7, layer 1
            data[2 * row] = data[2 * row + 1] = 3
            tensors["routed_experts"] = (dtype, shape, bytes(data))

        self.change(self.trace, repeat)
        for arguments in (["collect", self.trace, "--out", "new"], ["plan", self.trace, "--out", "new"], ["inspect", self.trace],
                          ["pack", self.trace, "--ranks", 4, "--tokens-per-rank", 64, "--out", "new"]):  # fmt: skip
            self.refuse(*arguments, saying=[self.trace, "routed_experts[7, 1, 1]"])

    def test_rejects_experts_that_ranks_do_not_divide(self):
        self.refuse("plan", self.trace, "--ranks", 3, "--out", "new", saying=[self.trace, "16 experts", "3 ranks"])
        self.refuse("collect", self.trace, "--ranks", 3, "--out", "new", saying=[self.trace, "16 experts", "3 ranks"])
        for kind in ("load", "trace"):
            self.refuse("synth", "--kind", kind, "--ranks", 7, "--out", "new", saying=["--ranks: 7 ranks do not divide the 128 --experts"])
        metadata, tensors = st.read(self.folder / self.step)
        dtype, shape, _ = tensors["load"]
        tensors["load"] = st.tensor(dtype, [*shape[:3], 15], [1] * (3 * 2 * 4 * 15))
        st.write(self.folder / "odd.safetensors", metadata | {"num_experts": "15"}, tensors)
        self.refuse("plan", "odd.safetensors", "--out", "new", saying=["odd.safetensors", "15 experts", "4 ranks"])

    def test_a_load_folds_only_to_a_divisor(self):
        self.refuse("plan", self.step, "--ranks", 3, "--out", "new", saying=[self.step, "3"])

    def test_rejects_a_sequence_above_tokens_per_rank(self):
        self.refuse("collect", self.trace, "--ranks", 2, "--tokens-per-rank", 5, "--out", "new",
                    saying=[self.trace, "cu_seqlens[0]", "--tokens-per-rank"])  # fmt: skip

    def test_rejects_homes_and_previous_plans_of_another_shape(self):
        other = self.synthesise("other.safetensors", experts=32)
        for option in ("--homes", "--previous"):
            self.refuse("plan", other, option, "plan.safetensors", "--out", "new", saying=["plan.safetensors", "16"])
        self.refuse("plan", self.step, "--previous-load", other, "--out", "new", saying=[other, "32"])

    def test_rejects_a_missing_layer(self):
        self.refuse("inspect", "plan.safetensors", "--layer", 2, "--json", saying=["--layer", "2"])
        self.refuse("inspect", self.step, "--layer", 9, "--json", saying=["--layer", "9"])

    def test_rejects_counts_of_fewer_experts_than_top_k(self):
        (self.folder / "rank0.jsonl").write_text('{"iter": 0, "layer": 0, "tpe": [[1, 2]]}\n')
        self.refuse("import", "rank0.jsonl", "--top-k", 99, "--out", "new", saying=["rank0.jsonl", "2 experts", "99"])

    def test_rejects_unknown_import_formats(self):
        (self.folder / "noise").write_bytes(bytes(range(256)))
        self.refuse("import", "noise", "--out", "new", saying=["noise"])
        self.refuse("import", "noise", "--out", "new", "--format", "telepathy", saying=["--format", "telepathy"])


class WrongOutputs(CommandTest):
    def test_an_unwritable_output_leaves_no_file(self):
        step = self.synthesise()
        trace = self.synthesise("step.trace.safetensors", kind="trace")
        (self.folder / "a.npy").write_bytes(npy((1, 1, 2), [0, 1]))
        for arguments in (["synth"], ["import", "a.npy"], ["collect", trace], ["plan", step]):
            with self.subTest(arguments):
                self.refuse(*arguments, "--out", "no/such/folder/x", saying=["no/such/folder/x", "cannot be written"])

    def test_rejects_an_unwritable_output_before_reading_the_input(self):
        for command in ("import", "collect", "plan"):
            self.refuse(command, "nowhere", "--out", "no/such/folder/x", saying=["no/such/folder/x", "cannot be written"])

    def test_rejects_an_output_that_is_also_an_input(self):
        step = self.synthesise()
        trace = self.synthesise("step.trace.safetensors", kind="trace")
        self.succeed("plan", step, "--out", "plan.safetensors")
        (self.folder / "a.npy").write_bytes(npy((1, 1, 2), [0, 1]))
        for arguments, taken in (
            (["import", "a.npy"], "a.npy"),
            (["collect", trace], trace),
            (["pack", trace, "--ranks", 4, "--tokens-per-rank", 64], trace),
            (["plan", step], step),
            (["plan", step, "--homes", "plan.safetensors"], "plan.safetensors"),
            (["plan", step, "--previous", "plan.safetensors"], "plan.safetensors"),
            (["plan", step, "--previous-load", trace], trace),
        ):
            (self.folder / "link").symlink_to(taken)
            for out in (taken, f"./{taken}", self.folder / taken, "link"):
                with self.subTest(arguments, out=out):
                    self.refuse(*arguments, "--out", out, saying=["--out: is also an input"])
            (self.folder / "link").unlink()

    def test_rejects_a_dash_as_output(self):
        self.refuse("plan", self.synthesise(), "--out", "-", saying=["--out: '-', expected the name of a file"])
        self.assertFalse((self.folder / "-").exists())

    def test_accepts_a_device_as_output(self):
        self.succeed("plan", self.synthesise(), "--out", "/dev/null")

    def test_a_full_disk_behind_stdout_is_an_error(self):
        step = self.synthesise()
        for arguments in (["inspect", step], ["plan", step, "--json"], ["compare", step], ["--help"], ["plan", "--help"],
                          ["--version"]):
            with self.subTest(arguments), open("/dev/full", "w") as full:
                done = subprocess.run([FOREMOE, *arguments], cwd=self.folder, stdout=full, stderr=subprocess.PIPE, text=True)
                self.assertEqual(done.returncode, 2)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)

    def test_a_failed_command_keeps_the_existing_output(self):
        step = self.synthesise()
        (self.folder / "plan.safetensors").write_text("precious")
        self.refuse("plan", step, "--ranks", 3, "--out", "plan.safetensors")
        self.assertEqual(self.files()["plan.safetensors"], b"precious")

    def test_a_successful_command_replaces_the_output_and_leaves_no_temporary_file(self):
        step = self.synthesise()
        (self.folder / "plan.safetensors").write_text("old")
        self.succeed("plan", step, "--out", "plan.safetensors")
        self.assertEqual(set(self.files()), {step, "plan.safetensors"})
        self.succeed("verify", step, "plan.safetensors")


if __name__ == "__main__":
    unittest.main()
