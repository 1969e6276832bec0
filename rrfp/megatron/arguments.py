"""The command-line flags, as one argument group. Imports neither torch nor megatron."""

import argparse

from rrfp.comm.choices import CHOICES
from rrfp.megatron.options import Options
from rrfp.tp_coord.agreement import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "readiness-driven pipeline", unless the parser has it already (a patched Megatron tree)."""
    if "--pipeline-schedule" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="readiness-driven pipeline (RRFP)")
    group.add_argument("--pipeline-schedule", default="1f1b", choices=["1f1b", "rrfp"],
                       help="1f1b: Megatron's own schedule (default). rrfp: run what is ready; a schedule is only a hint.")
    group.add_argument("--rrfp-hint", default="auto", metavar="HINT",
                       help="what ranks the ready work: auto (the best rule for the limit, the chunks and the split; default), a rule (announced, "
                       "bf, fb, b-first, f-first, alt, fill, fill-alt), a list (1f1b, gpipe; PyTorch's looped-bfs and interleaved-1f1b), with "
                       "--rrfp-split-backward also bfw, fill-r, zb-h1, zb-h2 and PyTorch's interleaved-zero-bubble, a name given to "
                       "rrfp.register_hint, module:function, or a file with one row of actions per rank.")
    group.add_argument("--rrfp-mode", default="ready", choices=["ready", "strict"],
                       help="ready: the hint ranks, nothing waits for an absent entry. strict: the hint's list in fixed order, the control.")
    group.add_argument("--rrfp-limit", default="auto", metavar="LIMIT",
                       help="activations in flight per stage: auto (default; Megatron's own number while memory and times are measured, then as many as "
                       "idle memory takes and simulation says help), 1f1b (P-s, Megatron's own), eager (2(P-s)-1), 2p-1, 2p, a number, a slope from "
                       "the first rank to the last like 23-9, one number per rank like 7,5,3,1, memory:<GiB> (as many as fit into so much), or "
                       "paper:<n> (the paper's backpressure).")
    group.add_argument("--rrfp-memory-fraction", type=float, default=0.9, metavar="SHARE",
                       help="what --rrfp-limit auto may fill: this share of the device's memory (on a CPU, of what is available).")
    group.add_argument("--rrfp-order", default="microbatch", choices=["microbatch", "megatron", "free"],
                       help="microbatch: forwards and backwards each in index order, results bitwise those of 1F1B (default). megatron: also "
                       "across chunks. free: any order; same mathematics, other rounding.")
    group.add_argument("--rrfp-lanes", type=int, default=1, metavar="N",
                       help="ordered channels per edge; with more than one, late messages don't hold back those behind them (pays with free order).")
    group.add_argument("--rrfp-split-backward", action="store_true",
                       help="run backwards as I (input gradient, which the stage before waits for) and W (weight gradients of linear layers, in "
                       "gaps). Same results bit for bit. An activation then counts until its W.")
    group.add_argument("--rrfp-max-pending-w", type=int, default=None, metavar="N",
                       help="microbatches per rank that may wait for their W; when so many do, the oldest goes first. Default: 1 under full "
                       "recomputation, else no bound but --rrfp-limit.")
    group.add_argument("--rrfp-agreement", default="auto", choices=list(KINDS),
                       help="how ranks whose actions share collectives (tensor, context, expert parallelism) agree on the next one. auto: "
                       "shared-memory inside a host, messages across hosts.")
    group.add_argument("--rrfp-decide-ahead", action="store_true",
                       help="agree on the next action before the running one: no decision takes time, but what becomes ready meanwhile is not "
                       "looked at. Pays where actions take a few milliseconds at most (docs/agreement.md).")
    group.add_argument("--rrfp-transport", default="auto", choices=list(CHOICES),
                       help="how what stages send each other gets from GPU to GPU. ipc: the copy engine, inside a host. host: through host "
                       "memory. auto: ipc where it works, else host. nccl: experimental (docs/gpu.md).")
    group.add_argument("--rrfp-run-ahead", type=int, default=1, metavar="N",
                       help="actions queued on the GPU behind the one that runs (default 1): more hide the host's time, fewer decide later.")
    group.add_argument("--rrfp-interface", default=None, metavar="NAME",
                       help="network interface or address for messages between hosts. Default: the one that faces the master.")
    group.add_argument("--rrfp-timeout", type=float, default=None, metavar="SECONDS",
                       help="fail when nothing has moved inside a call for this long (three times that in the first call). Default: Megatron's "
                       "--distributed-timeout-minutes.")
    group.add_argument("--rrfp-trace", default=None, metavar="DIR",
                       help="write what happened, one file per rank; `rrfp trace DIR` makes pictures and tables of it. Works with 1f1b too.")
    group.add_argument("--rrfp-emulate", default=None, metavar="SCENARIO",
                       help="NAME[:UNIT_MS[:SEED]]: sleep every action up to a drawn duration, to study schedules on a small machine. Works "
                       "with 1f1b too.")
    group.add_argument("--rrfp-inject", default=None, choices=["J0", "J1", "J2", "J3"],
                       help="the paper's jitter on top of real compute. Works with 1f1b too.")
    return parser


def options_from(args: argparse.Namespace) -> Options:
    """The options in Megatron's parsed arguments. Raises ConfigurationError."""
    timeout = args.rrfp_timeout
    if timeout is None:
        timeout = 60.0 * getattr(args, "distributed_timeout_minutes", 10)
    return Options(
        schedule=args.pipeline_schedule, hint=args.rrfp_hint, mode=args.rrfp_mode, limit=args.rrfp_limit, order=args.rrfp_order,
        memory_fraction=args.rrfp_memory_fraction, lanes=args.rrfp_lanes, split_backward=args.rrfp_split_backward,
        max_pending_w=args.rrfp_max_pending_w, agreement=args.rrfp_agreement, decide_ahead=args.rrfp_decide_ahead,
        transport=args.rrfp_transport, run_ahead=args.rrfp_run_ahead,
        interface=args.rrfp_interface, timeout=timeout,
        trace=args.rrfp_trace, emulate=args.rrfp_emulate, inject=args.rrfp_inject, nvtx=bool(getattr(args, "profile", False)),
    )
