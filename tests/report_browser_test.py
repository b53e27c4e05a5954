"""The page of `foremoe report` in a real browser: on a phone and on a large screen, in the light and in the dark.

Where there is no Chromium it says so and exits with 77.
"""

import itertools
import sys
import unittest

import web_driver
from foremoe_command import ROOT, CommandTest

SCREENS = list(itertools.product((400, 1600), ("light", "dark")))
EVIL = "<script>document.title=1</script><img src=x onerror=alert(1)>"

# Everything that is wrong with what is drawn now: it is measured, not guessed.
FAULTS = """
const faults = [];
const shown = [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 0);
const short = e => e.textContent.slice(0, 40);
if (document.documentElement.scrollWidth > innerWidth) faults.push('the page is wider than the screen');
for (const e of document.body.querySelectorAll('*')) {
  if (e.closest('.scroll') && !e.matches('.scroll')) continue;
  const box = e.getBoundingClientRect();
  if (box.width > 0 && (box.right > innerWidth + 1 || box.left < -1)) faults.push('outside: ' + e.tagName + ' ' + short(e));
}
for (const svg of shown) {
  const frame = svg.getBoundingClientRect();
  const name = svg.querySelector('title').textContent;
  if (frame.height < 40) faults.push(name + ' is ' + frame.height + ' high');
  const size = 11 * frame.width / svg.viewBox.baseVal.width;
  if (size < 9.5) faults.push(name + ': its small print has ' + size + ' pixels');
  const texts = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
  for (const [t, b] of texts) {
    if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
      faults.push(name + ' cuts off ' + short(t));
  }
  for (let i = 0; i < texts.length; ++i) for (let j = 0; j < i; ++j) {
    const [a, b] = [texts[i][1], texts[j][1]];
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 4) faults.push(name + ': ' + short(texts[i][0]) + ' meets ' + short(texts[j][0]));
  }
}
return [shown.length, faults];
"""

# The least contrast (WCAG 2) of text with the card or page that it stands on, and whether that is dark.
CONTRAST = """
const linear = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c) && c != 'transparent') return light(c); } return 1; };
let least = 99, where = '';
for (const e of document.querySelectorAll('p, h1, h2, dt, dd, span, th, td, summary, svg text')) {
  if (!e.getClientRects().length) continue;
  const style = getComputedStyle(e);
  const [a, b] = [light(e.tagName == 'text' ? style.fill : style.color), ground(e)];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < least) { least = contrast; where = e.textContent.slice(0, 40); }
}
return [least, where, ground(document.body)];
"""


class ReportInABrowser(CommandTest):
    @classmethod
    def setUpClass(cls):
        cls.browser = web_driver.Browser()
        cls.addClassCleanup(cls.browser.close)

    def page(self, load="step.load.safetensors", cluster="h100", ranks=16):
        options = {"experts": 128, "top_k": 8, "ranks": ranks, "ranks_per_node": 8, "tokens_per_rank": 256}
        self.synthesise(load, **options)
        self.succeed("report", load, "--cluster", cluster, "--model", "qwen3-30b-a3b", "--policy", "vanilla,static,foremoe",
                     "--guest-slots", "1,2", "--rollout-seconds", 3, "--memory-budget", 80, "--out", "page.html")
        return self.folder / "page.html"

    def look_at(self, page):
        """All screens, with everything folded and unfolded."""
        for width, scheme in SCREENS:
            with self.subTest(width=width, scheme=scheme):
                self.browser.screen(width, scheme)
                self.browser.open(page)
                charts, faults = self.browser.look(FAULTS)
                self.assertGreaterEqual(charts, 11)
                self.assertEqual(faults, [])
                self.browser.look("for (const d of document.querySelectorAll('details')) d.open = true;")
                self.assertEqual(self.browser.look(FAULTS), [charts, []])
                contrast, where, ground = self.browser.look(CONTRAST)
                self.assertGreaterEqual(contrast, 4.5, where)
                self.assertEqual(ground < 0.2, scheme == "dark")
                self.assertEqual(self.browser.console(), [])

    def test_it_renders_everywhere_without_a_word_on_the_console(self):
        page = self.page()
        self.look_at(page)
        self.assertEqual(self.browser.look("return performance.getEntriesByType('resource').length"), 0)
        self.assertEqual(self.browser.look("return document.scripts.length"), 0)

    def test_one_node_is_shown_as_well(self):
        self.look_at(self.page(ranks=4))

    def test_hostile_names_are_shown_as_text(self):
        preset = (ROOT / "data" / "clusters" / "h100.toml").read_text(encoding="utf-8")
        named = preset.replace('name = "h100"', f'name = "{EVIL}"')
        self.assertNotEqual(named, preset)
        (self.folder / "evil.toml").write_text(named, encoding="utf-8")
        load = EVIL.replace("/", "\u2215") + ".safetensors"
        self.look_at(self.page(load=load, cluster="evil.toml"))
        self.assertEqual(self.browser.look("return document.scripts.length + document.images.length"), 0)
        self.assertIn(EVIL, self.browser.look("return document.querySelector('h1').textContent"))
        self.assertIn("onerror", self.browser.look("return document.querySelector('.input').textContent"))
        self.assertIn("ForeMoE report", self.browser.look("return document.title"))

    def test_the_policy_forbids_what_somebody_might_add(self):
        page = self.page()
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace("</main>", f"{EVIL}</main>"), encoding="utf-8")
        self.browser.screen(1600, "light")
        self.browser.open(page)
        self.assertIn("ForeMoE report", self.browser.look("return document.title"))
        self.assertTrue(any("Content Security Policy" in line["message"] for line in self.browser.console()))


if __name__ == "__main__":
    lacking = web_driver.missing()
    if lacking:
        print(f"no {lacking} here (scripts/setup ci installs it): the page was looked at in no browser. OK (skipped=1)")
        sys.exit(77)
    unittest.main()
