"""Tests the page of `foremoe report` in a real browser, on small and large screens, in light and dark mode.

Without Chromium, prints the reason and exits with status 77.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
import tempfile
import unittest
from typing import Any

import foremoe
from foremoe.report import write_report

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import web_driver  # noqa: E402

SCREENS = list(itertools.product((400, 1600), ("light", "dark")))
EVIL = "<script>document.title=1</script><img src=x onerror=alert(1)><b>%{x}</b>"

# Returns the number of plots and a list of layout faults, such as text that overlaps or is cut off.
FAULTS = """
const faults = [];
const plots = [...document.querySelectorAll('.plot')];
const short = e => e.textContent.slice(0, 40);
if (document.documentElement.scrollWidth > innerWidth) faults.push('the page is wider than the screen');
for (const e of document.body.querySelectorAll('*')) {
  if (e.closest('.scroll') && !e.matches('.scroll')) continue;
  if (e.closest('svg') && e.tagName != 'text') continue;
  const box = e.getBoundingClientRect();
  if (box.width > 0 && (box.right > innerWidth + 1 || box.left < -1)) faults.push(`outside: ${e.tagName} ${short(e)}`);
}
const words = [...document.querySelectorAll('.legend span, .scale span')].filter(e => e.textContent);
for (const plot of [...plots, ...document.querySelectorAll('.legend, .scale')]) {
  const frame = plot.getBoundingClientRect();
  const name = plot.id || plot.className;
  const inside = plot.id ? [...plot.querySelectorAll('text')] : words.filter(e => plot.contains(e));
  const texts = inside.filter(t => t.textContent.trim()).map(t => [t, t.getBoundingClientRect()]);
  if (plot.id && frame.height < 100) faults.push(`${name} is ${frame.height} high`);
  if (plot.id && texts.length < 3) faults.push(`${name} has ${texts.length} texts`);
  for (const [t, b] of texts) {
    const size = parseFloat(getComputedStyle(t).fontSize);
    if (size < 9.5) faults.push(`${name}: ${short(t)} has ${size} pixels`);
    if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
      faults.push(`${name} cuts off ${short(t)}`);
  }
  for (let i = 0; i < texts.length; ++i) for (let j = 0; j < i; ++j) {
    const [a, b] = [texts[i][1], texts[j][1]];
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 4) faults.push(`${name}: ${short(texts[i][0])} meets ${short(texts[j][0])}`);
  }
}
return [plots.length, faults];
"""

# Returns the lowest contrast (WCAG 2) of text to its background, that text, and the luminance of the page.
CONTRAST = """
const linear = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => {
  const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = e => {
  for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c) && c != 'transparent') return light(c);
  }
  return 1;
};
let least = 99, where = '';
const kinds = 'p, h1, h2, dt, dd, span, th, td, summary, figcaption, svg text';
for (const e of document.querySelectorAll(kinds)) {
  if (!e.getClientRects().length || !e.textContent.trim()) continue;
  const style = getComputedStyle(e);
  const [a, b] = [light(e.tagName == 'text' ? style.fill : style.color), ground(e)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < least) { least = contrast; where = e.textContent.slice(0, 40); }
}
return [least, where, ground(document.body)];
"""

# Returns the screen position of a point in a plot's axis coordinates.
PLACE = """
const plot = document.getElementById('%s');
plot.scrollIntoView({block: 'center'});
const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();
return [box.left + xaxis._offset + xaxis.d2p(%s), box.top + yaxis._offset + yaxis.d2p(%s)];
"""

# Returns the names of the tables of policies that are wider than their boxes.
CUT_OFF = """
const boxes = [...document.querySelectorAll('#policies .scroll')];
return boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.getAttribute('aria-label'));
"""

A_MOMENT = "return new Promise(done => setTimeout(done, 400))"
HOVERED = "return document.querySelector('#%s .hoverlayer').textContent"


class ReportInABrowser(unittest.TestCase):
    browser: web_driver.Browser

    @classmethod
    def setUpClass(cls) -> None:
        cls.browser = web_driver.Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="foremoe-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def page(self, ranks: int = 16, cluster: str = "h100", micro_steps: int = 3, **options: Any) -> pathlib.Path:
        shape = {"layers": 2, "experts": 128, "top_k": 8, "micro_steps": micro_steps, "tokens_per_rank": 8192}
        self.load = foremoe.synthesize_load(ranks=ranks, ranks_per_node=8, **shape)
        options = {"guest_slots": (1, 2), "policies": "vanilla,static,foremoe-review-bpo,foremoe", **options}
        path = self.folder / "page.html"
        options |= {"rollout_seconds": 3, "memory_budget": 80}
        self.report = write_report(self.load, path, cluster=cluster, model="qwen3-30b-a3b", **options)
        return path

    def show(self, page: pathlib.Path, width: int, scheme: str) -> None:
        self.browser.screen(width, scheme)
        self.browser.open(page)

    def check_page(self, page: pathlib.Path) -> None:
        """Checks layout, contrast and console on all screens, with all details elements closed and open."""
        for width, scheme in SCREENS:
            with self.subTest(width=width, scheme=scheme):
                self.show(page, width, scheme)
                plots, faults = self.browser.look(FAULTS)
                self.assertGreaterEqual(plots, 11)
                self.assertEqual(faults, [])
                self.browser.look("for (const d of document.querySelectorAll('details')) d.open = true;")
                self.assertEqual(self.browser.look(FAULTS), [plots, []])
                contrast, where, ground = self.browser.look(CONTRAST)
                self.assertGreaterEqual(contrast, 4.5, where)
                self.assertEqual(ground < 0.2, scheme == "dark")
                self.assertEqual(self.browser.console(), [])

    def hover_over(self, plot: str, x: str, y: str) -> str:
        """Moves the mouse to the point. Returns the hover text."""
        left, top = self.browser.look(PLACE % (plot, x, y))
        for step in (3, 0):
            self.browser.tell("Input.dispatchMouseEvent", type="mouseMoved", x=left + step, y=top)
        self.browser.look(A_MOMENT)  # Plotly answers a move after 50 ms
        said: str = self.browser.look(HOVERED % plot)
        return said

    def test_the_page_renders_on_all_screens_without_console_messages(self) -> None:
        self.check_page(self.page())
        self.assertEqual(self.browser.look("return performance.getEntriesByType('resource').length"), 0)

    def test_a_page_of_one_node_one_micro_step_and_all_policies_renders(self) -> None:
        page = self.page(ranks=4, micro_steps=1, policies="all", guest_slots=(2, 1, 4))
        self.check_page(page)
        for width in (1000, 1300):
            self.show(page, width, "light")
            self.assertEqual(self.browser.look(CUT_OFF), [], f"tables wider than their boxes at {width} pixels")

    def test_hovering_shows_rank_micro_step_tokens_policy_and_values(self) -> None:
        page = self.page()
        for width, scheme in SCREENS:
            with self.subTest(width=width, scheme=scheme):
                self.show(page, width, scheme)
                tokens = f"{int(self.report.loads.before[2, 5]):,}"
                self.assertIn(f"rank 5, micro-step 2: {tokens} tokens", self.hover_over("load-before", "5", "2"))
                self.assertRegex(self.hover_over("experts-steady", "5", "1"), r"^expert 5, layer 1: \d")
                self.assertRegex(self.hover_over("rho", "1.02", "3"), "^foremoe: least 1.0")
                self.assertRegex(self.hover_over("time-update", "0.01", "1"), "^vanilla, dense: ")
                self.assertRegex(self.hover_over("nodes-0", "1", "0"), "^node 0 to node 1: ")
                rank = next(iter(self.report.windows[0].lanes))
                self.assertRegex(self.hover_over("timeline-0", "1e-5", "0"), f"^rank {rank}, dense: ")

    def test_plots_adapt_to_the_color_scheme_and_the_window_width(self) -> None:
        self.show(self.page(), 1600, "light")
        colour = "return getComputedStyle(document.querySelector('#rho .ytick text')).fill"
        wide = "return document.querySelector('#rho .main-svg').getBoundingClientRect().width"
        light = self.browser.look(colour)
        self.browser.screen(1600, "dark")
        self.browser.look(A_MOMENT)
        self.assertNotEqual(self.browser.look(colour), light)
        self.browser.screen(400, "dark")
        self.browser.look(A_MOMENT)
        self.assertLess(self.browser.look(wide), 400)
        self.assertEqual(self.browser.look(FAULTS)[1], [])

    def test_hostile_names_are_shown_as_text(self) -> None:
        preset = (ROOT / "data" / "clusters" / "h100.toml").read_text(encoding="utf-8")
        named = preset.replace('name = "h100"', f'name = "{EVIL}"')
        self.assertNotEqual(named, preset)
        cluster = self.folder / "evil.toml"
        cluster.write_text(named, encoding="utf-8")
        self.check_page(self.page(cluster=str(cluster)))
        self.assertEqual(self.browser.look("return document.images.length + document.scripts.length"), 3)
        self.assertIn(EVIL, self.browser.look("return document.querySelector('h1').textContent"))
        self.assertIn("ForeMoE report", self.browser.look("return document.title"))

    def test_the_content_security_policy_blocks_added_scripts_and_styles(self) -> None:
        page = self.page()
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("</main>", f"{EVIL}<style>h1 {{ color: red }}</style></main>"), encoding="utf-8")
        self.show(page, 1600, "light")
        self.assertIn("ForeMoE report", self.browser.look("return document.title"))
        refused = [line for line in self.browser.console() if "Content Security Policy" in line["message"]]
        self.assertGreaterEqual(len(refused), 3)  # the script, the image's handler, the style sheet


if __name__ == "__main__":
    lacking = web_driver.missing()
    if lacking:
        print(f"no {lacking} here (scripts/setup ci installs it): the page was looked at in no browser. OK (skipped=1)")
        sys.exit(77)
    unittest.main()
