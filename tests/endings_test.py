"""Tests that commands leave no partial files or shared memory and lose no output, even after signals and errors."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import time
import unittest

from foremoe_command import FOREMOE, CommandTest

SHARED_MEMORY = pathlib.Path("/dev/shm")


class Endings(CommandTest):
    def segments_of(self, pid):
        return [p.name for p in SHARED_MEMORY.glob("foremoe-*") if f"-{pid}-" in p.name]

    def test_signals_leave_no_shared_memory(self):
        load = self.synthesise()
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            with self.subTest(number), subprocess.Popen(
                [FOREMOE, "run", load, "--guest-slots", "1", "--repeats", "1000", "--no-reference", "--path", "host"],
                cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
            ) as running:  # fmt: skip
                deadline = time.monotonic() + 60
                while not self.segments_of(running.pid):
                    self.assertIsNone(running.poll())
                    self.assertLess(time.monotonic(), deadline, "no shared memory to be left")
                    time.sleep(0.01)
                running.send_signal(number)
                self.assertEqual(running.wait(60), -number)
                self.assertEqual(self.segments_of(running.pid), [])

    def test_a_file_above_the_size_limit_fails_and_leaves_no_file(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

        done = subprocess.run([FOREMOE, "synth", "--out", "load.safetensors"], cwd=self.folder, preexec_fn=limit,
                              capture_output=True, text=True)  # fmt: skip
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(done.stderr, "foremoe synth: load.safetensors: cannot be written: File too large\n")
        self.assertEqual(self.files(), {})

    def test_a_closed_stdout_causes_exit_code_2_and_complete_files(self):
        load = self.synthesise()
        self.succeed("plan", load, "--out", "expected.safetensors")
        for arguments in (["plan", load, "--out", "plan.safetensors"], ["inspect", load], ["--help"], ["--version"]):
            with self.subTest(arguments):
                done = subprocess.run([FOREMOE, *arguments], cwd=self.folder, preexec_fn=lambda: os.close(1),
                                      stderr=subprocess.PIPE, text=True)  # fmt: skip
                self.assertEqual(done.returncode, 2)
                self.assertRegex(done.stderr, r"^foremoe( \w+)?: standard output cannot be written\n$")
        files = self.files()
        self.assertEqual(files["plan.safetensors"], files["expected.safetensors"])

    def test_writes_through_a_symbolic_link(self):
        (self.folder / "there").write_text("old")
        for link, target in (("link", "there"), ("dangling", "not-yet-there")):
            with self.subTest(link):
                (self.folder / link).symlink_to(target)
                self.synthesise(out=link)
                self.assertTrue((self.folder / link).is_symlink())
                self.assertFalse((self.folder / target).is_symlink())
                self.succeed("inspect", target)


class HostileNames(CommandTest):
    """Control characters in file contents and file names do not move the cursor or start a new line."""

    HOSTILE = "\x1b[2Jgood\nplan.safetensors is right\x7f\u009b2J"

    def shown(self, *arguments):
        done = self.foremoe(*arguments)
        text = done.stdout + done.stderr
        self.assertRegex(text.replace("\n", ""), r"\A[^\x00-\x1f\x7f-\x9f]*\Z", arguments)
        return text

    def test_escapes_control_characters_of_plans_and_names(self):
        load = self.synthesise()
        self.succeed("plan", load, "--guest-slots", 1, "--out", "plan.safetensors")
        clean = self.shown("inspect", "plan.safetensors")

        def rename(metadata, tensors):
            metadata["policy"] = self.HOSTILE

        self.change("plan.safetensors", rename)
        hostile = self.shown("inspect", "plan.safetensors")
        self.assertIn(r"a plan by \x1b[2Jgood\nplan.safetensors is right\x7f\x9b2J, residency", hostile)
        self.assertEqual(len(hostile.splitlines()), len(clean.splitlines()))

        name = self.HOSTILE + ".safetensors"
        self.assertIn(r"\x1b[2Jgood", self.shown("inspect", name))
        self.synthesise(out=name)
        for arguments in (["inspect", name], ["plan", name], ["compare", name, "--policy", "vanilla"],
                          ["verify", name, "plan.safetensors"], ["plan", load, "--out", name], ["plan", load, "--" + name],
                          ["run", name, "--guest-slots", 1, "--layers", 1, "--micro-steps", 1]):  # fmt: skip
            with self.subTest(arguments):
                self.assertIn(r"\x1b[2Jgood", self.shown(*arguments))

    def test_errors_do_not_repeat_long_metadata(self):
        load = self.synthesise()
        self.succeed("plan", load, "--out", "plan.safetensors")

        def spoil(metadata, tensors):
            metadata["residency"] = "word " * 20_000

        self.change("plan.safetensors", spoil)
        self.refuse("verify", load, "plan.safetensors", saying=["plan.safetensors: residency: 'word", "is not a residency"])
        self.assertLess(len(self.foremoe("verify", load, "plan.safetensors").stderr), 2000)

        def spoil_options(metadata, tensors):
            metadata["residency"] = "resident"
            metadata["options"] = json.dumps({"homes": "word " * 20_000, "guest-slots": "word " * 20_000})

        self.change("plan.safetensors", spoil_options)
        self.assertLess(len(self.foremoe("verify", load, "plan.safetensors").stdout), 4000)


if __name__ == "__main__":
    unittest.main()
