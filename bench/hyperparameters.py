#!/usr/bin/env python3
"""Print the hyperparameters of every system as Markdown tables for lab/hyperparameters.md.

    bench/hyperparameters.py options|fixed|ours [--foremoe PROGRAM]

options: the keys of --policy-option, with range, default and meaning as the program prints them. fixed: the constants
in the systems' source files. ours: the options of the planner of `foremoe` and `static`. The script fails if an option
has no source in SOURCES, a source has no option, a constant differs from its file, or a system is in no table.
"""

import json
import pathlib
import re

from figures import command_line, printed, table

ROOT = pathlib.Path(__file__).resolve().parent.parent
SYSTEMS = ROOT / "src" / "foremoe" / "policy" / "systems"

# The source of each default, by policy and option. Options shared by several policies are listed under the first.
SOURCES = {
    ("eplb-ema", "alpha"): "ours; the review of ForeMoE averages (§1.5) and gives no α",
    ("eplb-ema", "period"): "ours: the 8 micro-steps of the review's step",
    ("finemoe-random", "solver"): "paper, §5.1, with CLP in place of HiGHS",
    ("finemoe-random", "alpha_ranks"): "paper, A.1: optional; 0.1 in C.3",
    ("finemoe-random", "alpha_nodes"): "paper, A.1: optional; 1 in C.3",
    ("finemoe-random", "scheduled_fraction"): "paper, A.2: pipelining is optional",
    ("finemoe-random", "overlap"): "ours; the paper overlaps (§5.4), which DeepEP does not permit (A.2)",
    ("finemoe", "threshold"): "ours; the paper has a threshold (§6.4) and gives none",
    ("finemoe", "interval"): "paper, §7.6, in iterations",
    ("finemoe", "window"): "ours, the interval; the paper averages (§6.4) and gives no length",
    ("finemoe", "samples"): "ours; the paper draws “many” (§6.3)",
    ("feplb", "dyn"): "text: practical default of 2, 4, 8",
    ("feplb", "min_tokens"): "text: τ",
    ("feplb", "max_num_dyn"): "text",
    ("feplb", "try_smaller"): "ours; chosen by the published percentages",
    ("feplb", "first_experts"): "ours; chosen by the published percentages",
    ("feplb", "charge_return"): "ours: the most that it can cost; not published",
    ("feplb-smaller", "try_smaller"): "the variant",
    ("foremoe-review", "base_epsilon"): "ours: as MDA's",
    ("foremoe-review", "epsilon"): "text, algorithm 3",
    ("foremoe-review", "overshoot"): "text, algorithm 2",
    ("foremoe-review", "try_smaller"): "text, as written",
    ("foremoe-review", "rounds"): "ours; the text names no number",
    ("ultraep", "min_tokens_per_replica"): "code: the default",
    ("ultraep", "whole_group"): "code: replicas stay in the NVLink domain, which is the node",
    ("ultraep", "planning_us"): "paper: 67 to 78",
    ("fastermoe", "rule"): "ours; `whole` is the artifact's, `expert` the later code's",
    ("fastermoe", "intermediate"): "ours: Qwen3-30B-A3B's",
    ("fastermoe", "bytes_per_second"): "ours: NVLink, else 400 Gb/s; code 50 Gb/s",
    ("fastermoe", "flops_per_second"): "ours; code 11.5 Tflop/s",
    ("laer", "sharded"): "paper: FSEP",
    ("laer", "perturbations"): "code; the artifact has 2",
    ("relibra", "move_price"): "ours: tokens that an expert computes while it moves, at 400 Gb/s and 400 Tflop/s",
    ("llep", "capacity_factor"): "code: the public command",
    ("llep", "min_chunk"): "code: the public command",
    ("llep", "imbalance_threshold"): "code: the public command",
    ("llep", "slot_limit"): "ours, for equal memory; the code has none",
}

# Policies, constant, value, file, text in the file, and the value's source.
FIXED = [
    ("eplb …", "groups of experts", "1", "eplb.h", "int num_groups = 1;", "ours: load tables have no groups"),
    ("ultraep", "first target ÷ mean", "1.01", "ultraep.h", "double tolerance = 0.01;", "code"),
    ("ultraep", "copies from which relays pay", "4", "ultraep.cpp", "kLeastForRelays = 4;", "code"),
    ("ultraep", "relays of an expert", "8", "ultraep.cpp", "kMostRelays = 8;", "code"),
    ("feplb …", "planning", "50 µs", "feplb.cpp", "kPublishedPlanningSeconds = 50e-6;", "text: about 50"),
    ("lplb", "planning", "100 µs", "lplb.cpp", ".planning_seconds = 100e-6", "code: about 100"),
    ("lplb", "topology", "by ranks", "lplb.h", "edges = lplb::Edges::kAutomatic;", "ours; each is the code's"),
    ("finemoe …", "planning per slot, LP 1", "1 µs", "finemoe.cpp", "return 1e-6;", "ours: finemoe-figure-11"),
    ("finemoe …", "planning per slot, LP 4", "4 µs", "finemoe.cpp", "return 4e-6;", "ours: finemoe-figure-11"),
    ("finemoe …", "planning per slot, exact", "0.06 µs", "finemoe.cpp", "return 0.06e-6;", "ours: finemoe-figure-11"),
    ("finemoe-symmetric, finemoe", "candidate graphs", "400", "finemoe/symmetric_placement.cpp", "kCandidates = 400;",
     "ours; the paper builds “many” (B.1)"),
    ("flexmoe", "rounds of a micro-step", "10", "flexmoe.h", "int rounds = 10;", "code"),
    ("flexmoe", "packed", "no", "flexmoe.h", "bool packed = false;", "ours, in its favour; the code packs"),
    ("flexmoe", "micro-steps of history", "5", "flexmoe.h", "int history = 5;", "LAER-MoE's artifact"),
    ("flexmoe", "inside the node first", "yes", "flexmoe.h", "bool inside_first = true;", "LAER-MoE's artifact"),
    ("smartmoe", "micro-steps between choices", "8", "smartmoe.h", "int period = 8;", "ours; the code has no default"),
    ("smartmoe", "micro-steps that decide", "2", "smartmoe.h", "int window = 2;", "code"),
    ("smartmoe", "parts of the load in the pool", "4", "smartmoe.h", "int pool_parts = 4;", "ours"),
    ("laer …", "micro-steps of history", "5", "laer.h", "int history = 5;", "code; 0 in `laer-oracle`"),
    ("laer …", "seconds per token", "1.48 µs", "laer.h", "seconds_per_token = 1.484375e-6;", "code"),
    ("laer …", "GB/s in a node", "216", "laer.h", "bytes_per_second_inside_nodes = 216.269e9;", "code"),
    ("laer …", "GB/s between nodes", "89", "laer.h", "bytes_per_second_between_nodes = 88.9539e9;", "code"),
    ("symi", "micro-steps of an iteration", "1", "symi.h", "int micro_steps_per_iteration = 1;", "ours; paper: a batch"),
    ("moonep", "tolerated excess", "0", "moonep.h", "double bound = 0;", "code; its issue 30"),
    ("echo", "slots of a rank", "1", "echo.cpp", "packed into one spare slot of every other rank", "code"),
    ("echo", "buckets", "8", "echo.cpp", "kBuckets = 8;", "code"),
    ("relibra", "weight of communication", "1", "relibra/expert_reordering.h", "communication_weight = 1;", "ours"),
    ("relibra", "trials per expert", "200", "relibra/expert_reordering.h", "trials_per_expert = 200;", "ours"),
    ("relibra", "trials of a layer", "20,000", "relibra/expert_reordering.h", "most_trials = 20000;", "ours"),
    ("relibra", "first temperature ÷ cost", "0.003", "relibra/expert_reordering.h", "first_temperature = 0.003;", "ours"),
    ("relibra", "last temperature ÷ cost", "0.00001", "relibra/expert_reordering.h", "last_temperature = 0.00001;", "ours"),
]

# Systems without constants, and our systems, which use the planner's options.
NOTHING = {"vanilla", "eplb", "eplb-oracle", "ema", "static", "foremoe"}

# The sources of the planner's defaults, by option.
OURS = {
    "guest_slots": "ours; experiments set it for all systems alike",
    "residency": "ours",
    "rehome": "ours: optimizer states stay",
    "stages": "paper, figure 5: its four stages; S is ours",
    "prefer": "ours",
    "copy_price": "ours: from cluster and model",
    "free_copies": "ours: from cluster and model",
    "tolerance": "ours: less balance saves copies",
    "max_copies_per_rank": "ours",
    "max_copies_per_source": "ours",
    "min_tokens_per_guest": "ours: quotas are exact",
    "prefetch_depth": "ours",
    "path": "ours; the paper has both",
}

GIVEN = {"homes", "previous", "previous_load", "in_flight", "seed"}  # inputs of a plan, not settings of the planner

OPTION = re.compile(r"  (?P<policy>[\w-]+) +(?P<name>\w+) +(?P<range>.*?): (?P<help>.*)")
DEFAULT = re.compile(r" \(default (?P<default>[^()]*)\)$|; not given: (?P<rule>.*)$")


def own_options(program):
    """Return {(option, range, meaning, default): [policies]} from --help-all."""
    text = printed(program, "simulate", "--help-all").partition("Options of single policies")[2]
    options = {}
    for line in text.splitlines()[1:]:
        if (found := OPTION.fullmatch(line)) is None:
            break
        default = DEFAULT.search(found["help"])
        value = (default["default"] or default["rule"]) if default else "none"
        meaning = DEFAULT.sub("", found["help"])
        options.setdefault((found["name"], found["range"], meaning, value), []).append(found["policy"])
    return options


def options_table(program):
    left = set(SOURCES)
    rows = []
    for (name, _, meaning, default), policies in own_options(program).items():
        if (policies[0], name) not in SOURCES:
            raise SystemExit(f"{policies[0]}: {name} has no source here")
        left.discard((policies[0], name))
        rows.append((", ".join(policies), name, default, meaning, SOURCES[policies[0], name]))
    if left:
        raise SystemExit(f"{sorted(left)} are options of no policy")
    expect_all_systems(program, {policy for policies in own_options(program).values() for policy in policies})
    table(["policy", "option", "default", "meaning", "source"], rows)


def expect_all_systems(program, with_options):
    text = printed(program, "simulate", "--help-all").partition("\nPolicies:\n")[2].partition("\n\n")[0]
    stems = {stem.removesuffix(" …") for policies, *_ in FIXED for stem in policies.split(", ")}
    for policy in (line.split()[0] for line in text.splitlines()):
        if policy not in with_options | NOTHING and not any(policy.startswith(stem) for stem in stems):
            raise SystemExit(f"{policy} is in no table")


def fixed_table(_program):
    for policies, name, _, file, fragment, _ in FIXED:
        if fragment not in " ".join((SYSTEMS / file).read_text(encoding="utf-8").replace("//", "").split()):
            raise SystemExit(f"{policies}: {name}: {file} does not have '{fragment}'")
    table(["policy", "constant", "value", "source"], [(p, n, v, s) for p, n, v, _, _, s in FIXED])


def ours_table(program):
    known = {option["name"]: option for option in json.loads(printed(program, "options", "--json"))["simulate"]}
    section = printed(program, "simulate", "--help-all").partition("\nPlanning:\n")[2].partition("\n\n")[0]
    planning = {name.replace("-", "_") for name in re.findall(r"^  (?:-\w,)?--([\w-]+)", section, re.MULTILINE)}
    if not planning:
        raise SystemExit("simulate --help-all has no options under Planning")
    if left := planning - OURS.keys() - GIVEN:
        raise SystemExit(f"planner options {sorted(left)} have no source here")
    rows = [(f"`--{name.replace('_', '-')}`", known[name]["default"], source) for name, source in OURS.items()]
    table(["option", "default", "source"], rows)


def main():
    parser = command_line(__doc__)
    tables = {"options": options_table, "fixed": fixed_table, "ours": ours_table}
    parser.add_argument("table", choices=tables)
    arguments = parser.parse_args()
    tables[arguments.table](arguments.foremoe)


if __name__ == "__main__":
    main()
