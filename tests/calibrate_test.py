"""Tests foremoe calibrate and the options for clusters and models. Other commands accept the calibrated cluster."""

import json
import re
import tomllib
import unittest

import safetensors_file as st
from foremoe_command import CommandTest

QUICK = ("--milliseconds", "1", "--hidden", "64", "--intermediate", "32", "--rows", "16", "--mebibytes", "1")


class CalibrateTest(CommandTest):
    def model_load(self):
        return self.synthesise(layers=1, experts=128, top_k=8, ranks=4, micro_steps=2)

    def test_prints_a_cluster_with_a_source_for_each_number(self):
        text = self.succeed("calibrate", "--ranks", "2", "--name", "two ranks", *QUICK)
        cluster = tomllib.loads(text)
        self.assertEqual(cluster["name"], "two ranks")
        self.assertEqual(cluster["ranks_per_node"], 2)
        self.assertGreater(cluster["device"]["flops_per_second"], 1e8)
        self.assertLessEqual(cluster["device"]["gemm_efficiency"], 1)
        for line in text.splitlines():
            if re.match(r"\w+ = [0-9]", line):
                self.assertRegex(line, r"# .{3,}", line)
        self.assertEqual(self.files(), {})

    def test_output_is_accepted_as_a_cluster(self):
        said = self.succeed("calibrate", "--ranks", "1", "--out", "machine.toml", *QUICK)
        self.assertIn("machine.toml", said)
        load = self.model_load()
        on = ("--cluster", "machine.toml", "--model", "qwen3-30b-a3b", "--bytes-per-parameter", "4")
        self.json_of("plan", load, *on, "--max-copies-per-rank", "hidden")

    def budget(self, load, cluster, model="Qwen3-30B-A3B"):
        self.succeed("plan", load, "--cluster", cluster, "--model", model, "-G", "2", "--residency", "resident",
                     "--max-copies-per-rank", "hidden", "--out", "plan.safetensors")
        metadata, _ = st.read(self.folder / "plan.safetensors")
        self.succeed("verify", load, "plan.safetensors")
        return json.loads(metadata["options"])["max-copies-per-rank"]

    def test_the_number_of_hidden_copies_depends_on_the_cluster(self):
        load = self.model_load()
        slow = self.succeed("calibrate", "--ranks", "1", *QUICK)
        # Independent of this machine: fast matrix products and slow links.
        for key, value in ("bytes", "1e6"), ("flops", "1e15"), ("memory_bytes", "1e13"):
            slow = re.sub(rf"(?m)^{key}_per_second = \S+", f"{key}_per_second = {value}", slow)
        (self.folder / "slow.toml").write_text(slow)
        self.assertEqual(self.budget(load, "slow.toml"), 0)
        self.assertGreater(self.budget(load, "H100"), 0)
        self.assertGreater(self.budget(load, "gb200"), self.budget(load, "a100"))

    def test_the_price_of_a_copy_depends_on_the_cluster_and_is_recorded(self):
        load = self.synthesise(layers=1, experts=128, top_k=8, ranks=4, micro_steps=2)

        def price(*options):
            self.succeed("plan", load, "--prefer", "time", *options, "--out", "plan.safetensors")
            self.succeed("verify", load, "plan.safetensors")
            recorded = json.loads(st.read(self.folder / "plan.safetensors")[0]["options"])
            return recorded["copy-price"], recorded["free-copies"]

        h100 = ("--cluster", "h100", "--model", "qwen3-30b-a3b")
        on_two_nodes = price(*h100, "--ranks-per-node", "2")[0]
        self.assertLess(0, on_two_nodes)
        self.assertLess(on_two_nodes, price(*h100)[0], "on one node, no copy keeps tokens from leaving")
        self.assertEqual(price(*h100, "--copy-price", "2.5", "--free-copies", "3"), (2.5, 3))

    def test_a_model_can_be_a_config_json(self):
        shape = {"hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
                 "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                 "vocab_size": 151936, "model_type": "qwen3_moe"}
        load = self.model_load()
        (self.folder / "config.json").write_text(json.dumps(shape))
        self.assertEqual(self.budget(load, "h100", "config.json"), self.budget(load, "h100"))
        (self.folder / "config.json").write_text(json.dumps(shape | {"moe_intermediate_size": 76800}))
        self.assertLess(self.budget(load, "h100", "config.json"), self.budget(load, "h100"))
        (self.folder / "config.json").write_text("{}")
        self.refuse("plan", load, "--cluster", "h100", "--model", "config.json", saying=("config.json", "missing"))

    def test_measures_more_ranks_than_processors(self):
        cluster = tomllib.loads(self.succeed("calibrate", "--ranks", "9", *QUICK))
        self.assertEqual(cluster["node"]["ranks_per_switch"], 9)

    def test_rejects_invalid_clusters_and_models(self):
        load = self.model_load()
        plan = lambda *options: self.refuse("plan", load, *options[:-1], saying=options[-1])
        plan("--cluster", "h100", ("--model", "required"))
        plan("--model", "DeepSeek-V3", ("--cluster", "required"))
        plan("--cluster", "b300", "--model", "DeepSeek-V3", ("b300", "gb200"))
        plan("--cluster", "h100", "--model", "GPT-2", ("--model", "GPT-2", "Kimi-K2"))
        plan("--cluster", "h100", "--model", "DeepSeek-V3", ("--model", "256", "128"))
        plan("--max-copies-per-rank", "hidden", ("--max-copies-per-rank", "hidden needs --cluster and --model"))
        plan("--prefer", "time", ("--prefer", "time needs --copy-price, or --cluster and --model"))
        plan("--prefer", "time", "--copy-price", "-1", ("--copy-price",))
        plan("--copy-price", "1", "--prefer", "balance", ("--copy-price: needs --prefer time",))
        plan("--free-copies", "1", ("--free-copies: needs --prefer time",))
        self.refuse("run", load, "--max-copies-per-rank", "hidden", saying=("--max-copies-per-rank", "hidden"))
        (self.folder / "wrong.toml").write_text("name = \"x\"\nranks_per_node = \"eight\"\n")
        plan("--cluster", "wrong.toml", "--model", "Mixtral-8x7B", ("wrong.toml", "ranks_per_node", "line 2"))
        for text, saying in (
            ('name = "\\u001b[31mred"\n', ("name", "line 1", "control character")),
            ('name = "two\\nlines"\n', ("name", "line 1", "control character")),
            ('name = "x"\nranks_per_nod = 8\n', ("ranks_per_nod", "line 2", "is not a key")),
            ('name = "x"\n[devise]\nflops_per_second = 1e12\n', ("devise", "line 2", "is not a key")),
        ):
            (self.folder / "wrong.toml").write_text(text)
            plan("--cluster", "wrong.toml", "--model", "Mixtral-8x7B", ("wrong.toml", *saying))

    def test_rejects_an_unwritable_output_before_measuring(self):
        self.refuse("calibrate", "--out", "no/such/folder/machine.toml", saying=("no/such/folder",))
        self.refuse("calibrate", "--ranks", "0", saying=("--ranks",))
        self.refuse("calibrate", "--name", "", saying=("--name",))
        self.refuse("calibrate", "--name", "two\nlines", saying=("--name",))


if __name__ == "__main__":
    unittest.main()
