"""Progress on a terminal: one line on stderr that is rewritten and removed. Results do not depend on it."""

import re
import unittest

from foremoe_command import CommandTest

LINE = re.compile(r"\r([^\r\n]*) … (\d+ s|\d+ %, \d+ (s|min) left)\x1b\[K")
REMOVED = "\r\x1b[K"


class Progress(CommandTest):
    def run_with_stderr(self, arguments, terminal):
        """Returns stdout, and stderr as written to a terminal or a pipe."""
        if not terminal:
            done = self.foremoe(*arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout, done.stderr
        with open(self.folder / "stdout", "w+") as stdout:
            shown = self.on_a_terminal(arguments, stdout=stdout)
            stdout.seek(0)
            return stdout.read(), shown

    def expect_lines_removed(self, shown):
        self.assertTrue(shown.endswith(REMOVED), repr(shown[-80:]))
        self.assertEqual(LINE.sub("", shown).replace(REMOVED, ""), "")

    def test_a_run_shows_the_share_done_and_the_time_left_and_removes_the_line(self):
        step = self.synthesise(layers=2, micro_steps=3)  # 6 turns forward, 12 in the policy update
        arguments = ["run", step, "--policy", "vanilla", "--no-reference", "--work-ms", 250]  # at least 4.5 s
        _, shown = self.run_with_stderr(arguments, terminal=True)
        self.expect_lines_removed(shown)
        lines = [(what, state) for what, state, _ in LINE.findall(shown)]
        self.assertIn("running vanilla, policy_update", [what for what, _ in lines])
        shares = [int(state.split()[0]) for what, state in lines if "%" in state and "policy_update" in what]
        self.assertTrue(shares and shares == sorted(shares) and shares[-1] <= 100, lines)
        _, piped = self.run_with_stderr(arguments, terminal=False)
        self.assertEqual(piped, "")

    def test_plans_and_comparisons_are_the_same_on_a_terminal_and_in_a_pipe(self):
        step = self.synthesise(layers=8, micro_steps=24, ranks=16, experts=128, top_k=8, tokens_per_rank=4096)
        plans, tables = [], []
        for terminal in (True, False):
            out = f"plan-{terminal}.safetensors"
            _, shown = self.run_with_stderr(["plan", step, "--guest-slots", 2, "--out", out], terminal)
            plans.append((self.folder / out).read_bytes())
            table, compared = self.run_with_stderr(["compare", step, "--policy", "vanilla,foremoe", "--json"], terminal)
            tables.append(re.sub(r'"plan_(seconds|us_per_layer_micro_step)": [\d.e+-]+', "", table))
            for text in (shown, compared):
                if terminal and text:  # nothing is shown if the machine needs less than a second
                    self.expect_lines_removed(text)
                if not terminal:
                    self.assertEqual(text, "")
            for what, _, _ in LINE.findall(compared):
                self.assertRegex(what, r"^reading|^[12] of 2, (planning with|checking the plan of) (vanilla|foremoe)$")
        self.assertEqual(plans[0], plans[1])
        self.assertEqual(tables[0], tables[1])


if __name__ == "__main__":
    unittest.main()
