"""Tests the help of the command and its subcommands."""

import json
import re
import unittest

from foremoe_command import SUBCOMMANDS, CommandTest


class Help(CommandTest):
    def test_help_lists_all_subcommands_and_exit_codes(self):
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

    def test_help_of_plan_lists_defaults(self):
        text = " ".join(self.succeed("plan", "--help-all").split())
        for words in ("(default resident)", "(default contiguous)", "(default BLPT)", "(default foremoe)", "(default 128)",
                      "(default 0.006; 0.01 where residency is shared)"):
            self.assertIn(words, text)

    def test_short_help_lists_main_options_and_refers_to_help_all(self):
        for name in SUBCOMMANDS:
            with self.subTest(name):
                short, full = self.succeed(name, "--help"), self.succeed(name, "--help-all")
                options = [line.split()[0] for line in short.splitlines() if line.startswith("  -")]
                self.assertLessEqual(len(options), 14, options)
                self.assertLess(len(short), len(full) + 1)
                if len(short) < len(full):
                    self.assertIn("--help-all", short)

    def test_short_help_lists_the_words_of_the_options_that_it_shows(self):
        for command, options in json.loads(self.succeed("options", "--json")).items():
            text = " ".join(self.succeed(command, "--help").partition("\nExamples:")[0].split())
            for option in options:
                shown = f" {option['option']} " in text
                for word in option.get("words", []) if shown and option["type"] == "word" else []:
                    with self.subTest(command, option=option["name"]):
                        self.assertRegex(text, rf"\b{re.escape(word)}\b")

    def test_options_lists_the_options_of_all_commands(self):
        listed = json.loads(self.succeed("options", "--json"))
        self.assertEqual(set(listed), set(SUBCOMMANDS) - {"options"})
        for command, options in listed.items():
            text = " ".join(self.succeed(command, "--help-all").split())
            for option in options:
                with self.subTest(command, option=option["name"]):
                    self.assertIn(option["option"], text)
                    self.assertIn(" ".join(option["help"].split()), text)
                    if "default" in option:
                        self.assertIn(f"(default {option['default']})", text)
        slots = next(option for option in listed["plan"] if option["name"] == "guest_slots")
        self.assertEqual((slots["type"], slots["range"], slots["default"]), ("integer", "0 … 65536", "1"))

    def test_commands_of_the_python_package_name_the_installation_command(self):
        text = self.succeed("--help")
        self.assertRegex(text, r"\n  report [^\n]*\n? *[^\n]*\(Python package\)")
        self.refuse("report", "x", "--cluster", "h100", "--out", "y", saying=["Python package", "pip install '.[report]'"])

    def test_prints_the_version(self):
        for option in ("--version", "-V"):
            self.assertRegex(self.succeed(option), r"^foremoe \d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    unittest.main()
