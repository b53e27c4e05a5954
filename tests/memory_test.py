"""Tests that every command refuses input that needs too much memory, with the amount, before it allocates it."""

import json
import struct
import subprocess
import time
import unittest

import safetensors_file as st
from foremoe_command import FOREMOE, SUBCOMMANDS, CommandTest


class Memory(CommandTest):
    def refuse_soon(self, *arguments, saying):
        began = time.monotonic()
        self.refuse(*arguments, "--max-memory", 0.5, saying=[*saying, "GB are available or allowed (--max-memory)"])
        self.assertLess(time.monotonic() - began, 5)

    def sparse_load(self, path):
        """Writes a load of 4 G cells. The file takes 17 GB, and nothing on the disk."""
        shape = [16, 64, 1024, 4096]
        header = {"__metadata__": {"format": "foremoe.load/1", "num_experts": "4096", "top_k": "1", "ranks_per_node": "8"},
                  "load": {"dtype": "U16", "shape": shape, "data_offsets": [0, 2 << 32]}}  # fmt: skip
        text = json.dumps(header).encode()
        with open(self.folder / path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + (2 << 32))
        return path

    def test_of_synthesis(self):
        large = ("--layers", 512, "--experts", 32768, "--ranks", 32768, "--micro-steps", 1024)
        self.refuse_soon("synth", "--out", "out", *large, saying=["load: needs 4503599.6 GB of memory"])
        self.refuse_soon("synth", "--out", "out", "--kind", "trace", "--tokens-per-rank", 1 << 20, "--ranks", 128,
                         saying=["--tokens-per-rank: needs 137.4 GB"])  # fmt: skip

    def test_of_loads(self):
        path = self.sparse_load("wide.safetensors")
        self.addCleanup((self.folder / path).unlink)
        self.files = dict  # does not read 8 GB
        for command in (("inspect",), ("plan", "--out", "plan"), ("compare",), ("fit", "--cluster", "h100"),
                        ("simulate", "--cluster", "h100"), ("run",), ("maps", "--to", "sglang", "--out", "maps.json")):  # fmt: skip
            with self.subTest(command):
                self.refuse_soon(command[0], path, *command[1:], saying=[f"{path}: load: needs 34.4 GB of memory"])

    def test_of_traces(self):
        self.synthesise("step.trace.safetensors", kind="trace", experts=4096, layers=64)

        def batch_apart(metadata, tensors):
            metadata.update(ranks="4096")
            sequences = tensors["rank"][1][0]
            tensors["rank"] = st.tensor("I32", [sequences], [*range(sequences - 1), 4095])

        self.change("step.trace.safetensors", batch_apart)
        self.refuse_soon("collect", "step.trace.safetensors", "--out", "load", saying=["load: needs 25.8 GB of memory"])

    def test_of_endless_input(self):
        with open("/dev/zero") as zeros:
            done = subprocess.run([FOREMOE, "import", "-", "--out", "out", "--max-memory", "0.2"], cwd=self.folder,
                                  stdin=zeros, capture_output=True, text=True)  # fmt: skip
        self.assertEqual(done.returncode, 2)
        self.assertRegex(done.stderr, r"^foremoe import: -: needs 0\.\d GB of memory; .*\(--max-memory\)\n$")

    def test_every_command_has_the_option(self):
        options = json.loads(self.succeed("options", "--json"))
        for command in SUBCOMMANDS:
            if command != "options":
                self.assertIn("max_memory", [option["name"] for option in options[command]])
        self.refuse("synth", "--out", "out", "--max-memory", "0", saying=["--max-memory: 0 is not above 0"])


if __name__ == "__main__":
    unittest.main()
