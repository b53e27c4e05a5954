"""Shared by the tests of the command: runs it in a temporary folder, and creates small input files."""

import fcntl
import json
import os
import pathlib
import pty
import shutil
import struct
import subprocess
import tempfile
import termios
import unittest

import safetensors_file as st

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOREMOE = os.environ.get("FOREMOE", str(ROOT / "build" / "release" / "bin" / "foremoe"))
BUNDLED = ROOT / "data" / "rollout-math.safetensors"
DATA = ROOT / "data"

SUBCOMMANDS = ("synth", "import", "routes", "collect", "pack", "inspect", "homes", "plan", "verify", "compare", "run",
               "calibrate", "simulate", "fit", "layout", "maps", "report", "options")


def npy(shape, values):
    """Returns a .npy file of uint8 values [tokens, layers, top_k]."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(values)


class CommandTest(unittest.TestCase):
    """Runs each test in an empty folder, so that it can check which files remain."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="foremoe-test-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def foremoe(self, *arguments):
        return subprocess.run([FOREMOE, *map(str, arguments)], cwd=self.folder, capture_output=True, text=True)

    def succeed(self, *arguments):
        """Runs the command, expects exit code 0, and returns stdout."""
        done = self.foremoe(*arguments)
        self.assertEqual(done.returncode, 0, f"{arguments}: {done.stderr}")
        return done.stdout

    def json_of(self, *arguments):
        return json.loads(self.succeed(*arguments, "--json"))

    def refuse(self, *arguments, saying=()):
        """Expects exit code 2, one line on stderr that contains `saying`, empty stdout, and unchanged files."""
        before = self.files()
        done = self.foremoe(*arguments)
        self.assertEqual(done.returncode, 2, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "", arguments)
        lines = done.stderr.splitlines()
        self.assertEqual(len(lines), 1, f"{arguments}: {done.stderr}")
        self.assertTrue(lines[0].startswith("foremoe"), lines[0])
        for word in saying:
            self.assertIn(word, lines[0], arguments)
        self.assertEqual(self.files(), before, arguments)

    def on_a_terminal(self, arguments, columns=0, stdout=None, **environment):
        """Returns stdout as written to a terminal of this width; with a file for stdout, returns stderr instead.

        Skips the test if pseudo-terminals are not available.
        """
        try:
            ours, theirs = pty.openpty()
        except OSError as error:
            self.skipTest(f"no pseudo-terminal is available: {error}")
        if columns:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        streams = {"stdout": theirs} if stdout is None else {"stdout": stdout, "stderr": theirs}
        done = subprocess.Popen([FOREMOE, *map(str, arguments)], cwd=self.folder, **streams,
                                env={"TERM": "xterm", **environment})  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # the other end is closed
            pass
        os.close(ours)
        self.assertEqual(done.wait(), 0, shown)
        return shown.decode()

    def files(self):
        return {p.name: p.read_bytes() for p in self.folder.iterdir()}

    def synthesise(self, out="step.load.safetensors", **options):
        """Creates a small load: 3 micro-steps, 2 layers, 4 ranks, 16 experts, top-2."""
        given = {"layers": 2, "experts": 16, "top_k": 2, "micro_steps": 3, "ranks": 4, "tokens_per_rank": 64, **options}
        words = [word for key, value in given.items() for word in ("--" + key.replace("_", "-"), value)]
        self.succeed("synth", "--out", out, *words)
        return out

    def change(self, path, edit):
        """Modifies a safetensors file. edit(metadata, tensors) changes both in place."""
        metadata, tensors = st.read(self.folder / path)
        edit(metadata, tensors)
        st.write(self.folder / path, metadata, tensors)
