# SPDX-License-Identifier: Apache-2.0
"""The ``pcp`` command. One module per verb; this one only parses arguments and prints."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from pcp_passes.cli.kernels import kernels_app
from pcp_passes.cli.mesh import mesh
from pcp_passes.errors import ConfigError, PcpError, Refusal
from pcp_passes.options import unknown_choice

app = typer.Typer(help="Prefill context parallelism by graph passes.", no_args_is_help=True, add_completion=False)
app.add_typer(kernels_app, name="kernels")
app.command()(mesh)
console = Console()

Pcp = Annotated[int, typer.Option("--pcp", min=1, help="Ranks of the prefill-context-parallel group.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Layout = Annotated[str, typer.Option(help="zigzag, interleave or contiguous.")]
Decode = Annotated[str, typer.Option(help="replicate: decodes run on every rank; owner: each on one.")]


def main() -> None:
    """Entry point of the console script: a user's mistake is one clear message, not a traceback."""
    try:
        app()
    except PcpError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
        Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(str(error))
        sys.exit(2)


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise typer.BadParameter(f"expected lengths such as 5,37,100, found {text!r}") from None


def _emit(data: Any) -> None:
    console.out(json.dumps(data, indent=2), highlight=False)


def _import(modules: list[str] | None) -> None:
    for module in modules or ():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise typer.BadParameter(f"cannot import {module}: {error}") from error


@app.command()
def plan(
    lens: Annotated[str, typer.Option("--lens", help="New tokens of each prefill, such as 3073,37,1.")] = "",
    pcp: Pcp = 2,
    computed: Annotated[str, typer.Option(help="Context length of each prefill (chunked, or prefix hits).")] = "",
    decodes: Annotated[int, typer.Option(min=0, help="One-token decodes beside the prefills.")] = 0,
    layout: Layout = "zigzag",
    decode: Decode = "replicate",
    as_json: Json = False,
) -> None:
    """Show which rank holds which tokens of a batch, with padding and replication."""
    from pcp_passes.cli.plan import plan_json, render_plan

    options: dict[str, Any] = {"layout": layout, "decode": decode, "decodes": decodes}
    options["computed"] = _lengths(computed) or None
    if as_json:
        _emit(plan_json(_lengths(lens), pcp, **options))
    else:
        console.print(render_plan(_lengths(lens), pcp, **options))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A folder or file with a config.json, or a shipped name: glm-5.2, ...")],
    pcp: Pcp = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Length of the prompt that is counted.")] = 32768,
    layout: Layout = "zigzag",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32, of weights and activations.")] = "bf16",
    outputs: Annotated[str, typer.Option(help="Logits that leave: last (token), global or local.")] = "last",
    full: Annotated[bool, typer.Option(help="Capture every layer, not one of each kind.")] = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Capture in vLLM; only --layers and --pcp apply.")] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="With --vllm: capture only this many layers.")] = None,
    drafter: Annotated[str, typer.Option(help="none, or mtp: the step program of target and drafter.")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="With --drafter: drafts per step.")] = 3,
    graph: Annotated[bool, typer.Option(help="Print the rewritten graph too.")] = False,
    cudagraph: Annotated[bool, typer.Option("--cudagraph", help="CUDA graphs: pieces, cuts, buckets.")] = False,
    budget: Annotated[int | None, typer.Option(min=1, help="With --cudagraph: tokens of a step, or 8192.")] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="With --cudagraph: requests, or 256.")] = None,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages: what they send to each other.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Replicas.")] = 1,
    expert_parallel: Annotated[bool, typer.Option("--expert-parallel", help="Experts over DP x PCP.")] = False,
    as_json: Json = False,
) -> None:
    """Show what sharding MODEL means: work, collectives, memory, fallbacks. Needs its config.json, no weights.

    With --drafter, show what a step moves between ranks, and between target and drafter.

    With --cudagraph, show the pieces that CUDA graphs would hold and why they are cut; static inputs; buckets.
    --tokens, --layout, --outputs and --graph do not matter then.

    With --pp, --dp or --expert-parallel, show the stages, what they send to each other, and collectives by group; the
    same options do not matter.

    Exits with 1 when the model is refused.
    """
    from pcp_passes.cli.inspect import inspect_configuration, inspect_in_vllm, render_model, render_vllm
    from pcp_passes.cli.inspect_graphs import inspect_graphs, render_graphs
    from pcp_passes.cli.inspect_stages import inspect_stages, render_stages
    from pcp_passes.cli.inspect_step import inspect_step, render_step

    for option, given in (("--budget", budget), ("--max-requests", max_requests)):
        if given is not None and not cudagraph:
            raise ConfigError(f"{option} {given} sizes what CUDA graphs hold; add --cudagraph, or leave it out.")
    try:
        if pp > 1 or dp > 1 or expert_parallel:
            staged = inspect_stages(
                model, pcp=pcp, pp=pp, dp=dp, expert_parallel=expert_parallel, drafter=drafter, steps=steps,
                dtype=dtype, full=full, vllm=vllm, cudagraph=cudagraph,
            )  # fmt: skip
            data, shown, text = staged.to_json(), render_stages(staged), ""
        elif cudagraph:
            graphs = inspect_graphs(
                model, drafter=drafter, steps=steps, pcp=pcp, dtype=dtype, budget=budget or 8192,
                max_requests=max_requests or 256, full=full, vllm=vllm,
            )  # fmt: skip
            data, shown, text = graphs.to_json(), render_graphs(graphs), ""
        elif drafter != "none":
            found, text = inspect_step(
                model, drafter=drafter, steps=steps, pcp=pcp, tokens=tokens, layout=layout, dtype=dtype, full=full,
                vllm=vllm,
            )  # fmt: skip
            data, shown = {**found.to_json(), "graph": text}, render_step(found)
        elif vllm:
            data = inspect_in_vllm(model, pcp=pcp, layers=layers)
            shown, text = render_vllm(data), data["graph"]
        else:
            report, text = inspect_configuration(
                model, pcp=pcp, tokens=tokens, layout=layout, dtype=dtype, outputs=outputs, full=full
            )
            data, shown = {**report.to_json(), "graph": text}, render_model(report)
    except Refusal as refusal:
        console.print(str(refusal), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from refusal
    if as_json:
        _emit(data)
        return
    console.print(shown)
    if graph:
        console.out(text, highlight=False)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face model folder.")],
    prompt: Annotated[str, typer.Option(help="The prompt; @FILE reads it from a file.")] = "The capital of France is",
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    pcp: Pcp = 2,
    mode: Annotated[int, typer.Option(min=2, max=3, help="2: whole graph. 3: vLLM's piecewise split.")] = 2,
    backend: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    decode: Decode = "replicate",
    engine: Annotated[str, typer.Option(help="vllm, or embedded: the reference engine, ranks simulated.")] = "vllm",
    drafter: Annotated[str, typer.Option(help="With the embedded engine: none, or mtp.")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="With --drafter: drafts per step.")] = 3,
    dtype: Annotated[str, typer.Option(help="With the embedded engine: fp64 (judges equality) or fp32.")] = "fp64",
    graph_mode: Annotated[
        str,
        typer.Option(
            help="With the embedded engine: none, piecewise, full_decode_only or full_and_piecewise. On CPU, as here, "
            "a checker stands in for CUDA graphs."
        ),
    ] = "none",
    pp: Annotated[int, typer.Option(min=1, help="With the embedded engine: pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="With the embedded engine: replicas, each given the prompt.")] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="With the embedded engine: shard experts over dp and pcp.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate with PCP=1 and PCP=P side by side. Exits with 1 when tokens (or accepted drafts) differ."""
    text = Path(prompt[1:]).read_text() if prompt.startswith("@") else prompt
    if engine == "embedded":
        _generate_embedded(
            model, text, as_json, pcp=pcp, max_tokens=max_tokens, decode=decode, drafter=drafter, steps=steps,
            dtype=dtype, graph_mode=graph_mode, pp=pp, dp=dp, expert_parallel=expert_parallel,
        )  # fmt: skip
    if engine != "vllm":
        raise ConfigError(unknown_choice("engine", engine, ("vllm", "embedded")))
    if drafter != "none":
        raise ConfigError(f"--drafter {drafter} is for --engine embedded; in vLLM, set its speculative_config.")
    if graph_mode != "none":
        raise ConfigError(f"--graph-mode {graph_mode} is for --engine embedded; in vLLM, set its compilation_config.")
    if pp > 1 or dp > 1 or expert_parallel:
        raise ConfigError("--pp, --dp and --expert-parallel are for --engine embedded; vLLM has options of its own.")
    from pcp_passes.cli.generate import compare, render_comparison

    with console.status("starting") as status:
        result = compare(
            model,
            text,
            max_tokens=max_tokens,
            pcp=pcp,
            mode=mode,
            backend=backend,
            options={"decode": decode},
            progress=status.update,
        )
    if as_json:
        _emit(result.to_json())
    else:
        console.print(render_comparison(result))
    raise typer.Exit(0 if result.tokens_equal else 1)


def _generate_embedded(model: str, text: str, as_json: bool, **given: Any) -> NoReturn:
    from pcp_passes.cli.generate_embedded import compare_embedded, render_embedded

    with Console(stderr=True).status("starting") as status:
        result = compare_embedded(model, text, progress=status.update, **given)
    if as_json:
        _emit(result.to_json())
    else:
        console.print(render_embedded(result), soft_wrap=True)
    raise typer.Exit(0 if result.tokens_equal else 1)


@app.command()
def doctor(
    self_test: Annotated[bool, typer.Option(help="Run the two-process self-test.")] = True, as_json: Json = False
) -> None:
    """Check the environment, the plugin and two real ranks; say how far each feature has been proven."""
    from pcp_passes.cli.doctor import examine, render_findings

    findings = examine(self_test=self_test)
    if as_json:
        _emit(findings)
    else:
        console.print(render_findings(findings))
    raise typer.Exit(0 if findings["healthy"] else 1)


Imports = Annotated[
    list[str] | None, typer.Option("--import", help="Import this module first: it registers ops that the dump names.")
]
DumpPath = Annotated[Path, typer.Argument(help="A dump folder (it holds manifest.json), or a folder above one.")]


@app.command()
def run(
    passes: Annotated[str, typer.Argument(help="Passes in order, such as place-rows,mask-padding; or a pipeline.")],
    dump: Annotated[Path, typer.Argument(help="A dump folder, or one .txt file of a dump.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the new dump.")] = None,
    pcp: Annotated[int | None, typer.Option("--pcp", min=1, help="Ranks, instead of the dump's.")] = None,
    graph: Annotated[bool, typer.Option(help="Print the rewritten graph too.")] = False,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Run PASSES on the graph of a dump; show what each did, and write a new dump."""
    from pcp_passes.cli.run import render_run, run_passes

    _import(imports)
    result = run_passes(passes, dump, out, pcp)
    if as_json:
        _emit(result)
        return
    console.print(render_run(result))
    if graph:
        console.out(result["graph"], highlight=False)


@app.command(name="passes")
def list_passes(as_json: Json = False) -> None:
    """List every pass: what it does, requires, establishes and breaks."""
    from pcp_passes.cli.passes import passes_json, render_passes

    if as_json:
        _emit(passes_json())
    else:
        console.print(render_passes(passes_json()))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A dump folder or a .txt file.")],
    b: Annotated[Path | None, typer.Argument(help="Another; without it, the stages of A are compared.")] = None,
    comments: Annotated[bool, typer.Option(help="Compare modules, source lines and passes too.")] = False,
    placements: Annotated[bool, typer.Option(help="Compare placements too.")] = True,
    context: Annotated[int, typer.Option(min=0, help="Lines around each change.")] = 3,
    as_json: Json = False,
) -> None:
    """Show how two graphs, two dumps or the stages of one differ. Exits with 1 when they do."""
    from pcp_passes.cli.diff import Show, diff_graphs, render_diff

    result = diff_graphs(a, b, Show(comments, placements, context))
    if as_json:
        _emit(result)
    else:
        console.print(render_diff(result))
    raise typer.Exit(0 if result["equal"] else 1)


@app.command()
def why(
    dump: DumpPath,
    node: Annotated[str, typer.Argument(help="A node's name, such as %cat_3.")],
    as_json: Json = False,
) -> None:
    """Explain one node of a dump: who made it, where its rows live and why, operands, users, stages."""
    from pcp_passes.cli.why import explain, render_why

    result = explain(dump, node)
    if as_json:
        _emit(result)
    else:
        console.print(render_why(result), soft_wrap=True)


@app.command()
def check(dump: DumpPath, imports: Imports = None, as_json: Json = False) -> None:
    """Check a dump: whole, unchanged, and every invariant that stands holds. Exits with 1 on a problem."""
    from pcp_passes.cli.check import check_dumps, render_check

    _import(imports)
    result = check_dumps(dump)
    if as_json:
        _emit(result)
    else:
        console.print(render_check(result), soft_wrap=True)
    raise typer.Exit(0 if result["healthy"] else 1)


@app.command()
def zoo(
    types: Annotated[list[str] | None, typer.Argument(help="Model types of transformers, such as llama.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every causal language model of transformers.")] = False,
    pcp: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,3,4",
    lengths: Annotated[str, typer.Option(help="Prompt lengths; by default those that suit each model.")] = "",
    unknown: Annotated[str, typer.Option(help="refuse, or replicate what cannot be known to be sharded.")] = "refuse",
    jobs: Annotated[int, typer.Option(min=1, help="Models at a time.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one model.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Check tiny models of transformers on simulated ranks. Exits with 1 when one is wrong, fails or proves nothing."""
    from pcp_passes.cli.zoo import render_zoo, run_zoo

    with Console(stderr=True).status("starting") as status:
        result = run_zoo(
            types or [],
            everything=everything,
            pcp=_lengths(pcp),
            lengths=_lengths(lengths) or None,
            unknown=unknown,
            jobs=jobs,
            timeout=timeout,
            progress=lambda row, done, total: status.update(f"{done} of {total}: {row['type']} {row['verdict']}"),
        )
    if as_json:
        _emit(result)
    else:
        console.print(render_zoo(result), soft_wrap=True)
    raise typer.Exit(1 if result["failed"] else 0)
