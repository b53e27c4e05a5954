"""--help teaches, and needs no input to do so."""

import unittest

from foremoe_command import SUBCOMMANDS, CommandTest


class Help(CommandTest):
    def test_the_command_tells_all_its_subcommands_and_exit_codes(self):
        text = self.succeed("--help")
        for name in SUBCOMMANDS:
            self.assertIn(name, text)
        self.assertIn("Exit codes", text)

    def test_every_subcommand_has_help_with_examples_on_stdout(self):
        for name in SUBCOMMANDS:
            with self.subTest(name):
                done = self.foremoe(name, "--help")
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("Examples:", done.stdout)
                self.assertIn(f"foremoe {name} ", done.stdout)
                self.assertLessEqual(max(map(len, done.stdout.splitlines())), 125)

    def test_plan_tells_its_defaults(self):
        text = " ".join(self.succeed("plan", "--help").split())
        for words in ("(default resident)", "(default contiguous)", "(default BLPT)", "(default foremoe)", "(default 128)",
                      "(default 0.006; 0.01 where residency is shared)"):
            self.assertIn(words, text)

    def test_the_version_is_told(self):
        self.assertRegex(self.succeed("--version"), r"^foremoe \d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    unittest.main()
