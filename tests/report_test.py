"""foremoe report: a page for people, whole or not at all."""

import unittest

import safetensors_file as st
from foremoe_command import CommandTest


class Report(CommandTest):
    def setUp(self):
        super().setUp()
        self.load = self.synthesise(experts=128, top_k=8)
        self.given = (self.load, "--cluster", "h100", "--model", "qwen3-30b-a3b", "--guest-slots", 1)

    def test_a_page_with_every_policy_that_was_asked_for_and_vanilla(self):
        said = self.succeed("report", *self.given, "--policy", "eplb,foremoe", "--out", "page.html")
        self.assertIn("page.html", said)
        page = (self.folder / "page.html").read_text(encoding="utf-8")
        for name in ("vanilla", "eplb", "foremoe"):
            self.assertIn(f'<th scope="row">{name}</th>', page)
        for part in ("load", "balance", "shares", "time", "ablation", "memory", "traffic", "timeline"):
            self.assertIn(f'<section id="{part}"', page)

    def test_the_numbers_are_those_of_simulate(self):
        self.succeed("report", *self.given, "--policy", "foremoe", "--out", "page.html")
        page = (self.folder / "page.html").read_text(encoding="utf-8")
        options = ("--cluster", "h100", "--model", "qwen3-30b-a3b", "--guest-slots", 1, "--policy", "foremoe")
        (ours,) = self.json_of("simulate", self.load, *options)
        for number in (f"{ours['speedup_over_vanilla']:.2f}×", f"{ours['rho']['mean']:.3f}"):
            self.assertIn(f"<td>{number}</td>", page)

    def test_a_policy_that_is_not_defined_here_is_told_with_its_reason(self):
        self.succeed("report", *self.given, "--policy", "all", "--out", "page.html")
        self.assertIn("skipped: ", (self.folder / "page.html").read_text(encoding="utf-8"))

    def test_a_page_that_is_there_is_replaced_and_equal_input_is_an_equal_page(self):
        (self.folder / "page.html").write_text("old")
        pages = []
        for out in ("page.html", "again.html"):
            self.succeed("report", *self.given, "--policy", "static", "--threads", len(pages) + 1, "--out", out)
            pages.append((self.folder / out).read_text(encoding="utf-8"))
        without_time = [[line for line in page.splitlines() if "µs</td>" not in line] for page in pages]
        self.assertEqual(*without_time)

    def test_where_nothing_but_vanilla_can_be_planned_nothing_is_compared(self):
        said = self.succeed("report", *self.given, "--policy", "eplb", "--in-flight", 2, "--out", "page.html")
        self.assertIn("nothing could be planned but vanilla", said)
        self.assertNotIn("as fast as", said)
        page = (self.folder / "page.html").read_text(encoding="utf-8")
        self.assertIn("Nothing but vanilla could be planned", page)
        self.assertNotIn("as fast", page[page.index('<p class="summary">'):page.index("</header>")])

    def test_no_load_is_told_as_that(self):
        def no_load(metadata, tensors):
            _, shape, _ = tensors["load"]
            tensors["load"] = st.tensor("I64", shape, [0] * len(list(st.values(tensors["load"]))))

        self.change(self.load, no_load)
        self.assertIn("no load", self.succeed("report", *self.given, "--policy", "foremoe", "--out", "page.html"))
        page = (self.folder / "page.html").read_text(encoding="utf-8")
        self.assertIn("No load", page)
        self.assertNotIn("0.000 times the mean load", page)
        self.assertIn("<td>–</td>", page)
        self.assertNotIn("<td>0.000</td>", page)

    def test_the_page_says_what_does_not_fit_and_all_that_was_asked(self):
        self.succeed("report", *self.given, "--policy", "vanilla", "--optimizer-shards", 64, "--memory-budget", 0.5, "--out", "page.html")
        page = (self.folder / "page.html").read_text(encoding="utf-8")
        self.assertIn("nothing fits the budget of 0.5 GB; the least is", page)
        self.assertIn("<dt>data-parallel ranks that share optimizer state</dt><dd>64</dd>", page)
        self.assertIn("<dt>memory of a rank</dt><dd>80.0 GB</dd>", page)
        self.assertIn("balances worst on average", page)

    def test_the_help_speaks_of_no_residency_that_is_refused(self):
        self.assertNotIn("auto stays within", " ".join(self.succeed("report", "--help").split()))
        self.refuse("report", *self.given, "--residency", "auto", "--out", "page.html", saying=["--residency", "auto"])

    def test_what_cannot_be_is_refused_before_the_work(self):
        self.refuse("report", *self.given, "--out", "nowhere/page.html", saying=["nowhere"])
        self.refuse("report", *self.given, "--out", self.load, saying=["--out", "also an input"])
        self.refuse("report", *self.given, saying=["--out"])
        self.refuse("report", *self.given, "--out", "", saying=["--out", "empty"])
        self.refuse("report", *self.given[:-1], "x", "--out", "page.html", saying=["--guest-slots"])
        self.refuse("report", self.load, "--cluster", "h100", "--model", "deepseek-v3", "--out", "page.html",
                    saying=["--model"])
        self.refuse("report", self.load, "--cluster", "nowhere", "--model", "qwen3-30b-a3b", "--out", "page.html",
                    saying=["nowhere"])


if __name__ == "__main__":
    unittest.main()
