"""`LLM` in a notebook: on the thread of a running event loop, with bars that are widgets."""

import asyncio
import io
import os
import re
import subprocess
import sys

import pytest
from tqdm import tqdm

from forge_jax import LLM, SamplingParams
from forge_jax.host.progress import progress_bar

GREEDY = SamplingParams(max_tokens=8, temperature=0)

# Stand-ins for the parts of Jupyter that tqdm looks for: a kernel, and widgets.
IN_A_KERNEL = """
import sys, types, warnings

warnings.simplefilter("error")
for name in ("IPython", "IPython.display", "ipykernel.zmqshell"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["IPython"].get_ipython = types.SimpleNamespace
sys.modules["IPython.display"].display = print
from forge_jax.host.progress import progress_bar

bar = progress_bar(total=1, unit="lines", show=False)
print("notebook" if "tqdm.notebook" in {kind.__module__ for kind in type(bar).__mro__} else "text")
"""
WIDGETS = "class IntProgress: pass\nFloatProgress = HBox = HTML = Layout = IntProgress\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "show", "shown"),
    [(_Terminal(), True, "2/2"), (_Terminal(), False, ""), (io.StringIO(), True, "")],
)
def test_bars_are_shown_on_terminals_only(file, show, shown):
    with progress_bar(total=2, unit="lines", show=show, file=file) as bar:
        bar.update(2)
    written = file.getvalue()
    assert shown in written and bool(written) == bool(shown)
    assert not shown or re.search(r"[\d.]+ lines/s", written)


async def test_llm_runs_on_the_thread_of_an_event_loop(stories):
    llm = LLM(str(stories), max_num_seqs=2, num_blocks=64, max_model_len=64)
    asyncio.get_running_loop()  # raises if there is none
    [output] = llm.generate("Once upon a time", GREEDY, progress=False)
    streamed = "".join(delta.text for delta in llm.stream("Once upon a time", GREEDY))
    assert output.text == streamed != ""
    await asyncio.sleep(0)


async def test_llm_runs_in_a_thread_next_to_an_event_loop(stories):
    llm = LLM(str(stories), max_num_seqs=2, num_blocks=64, max_model_len=64)
    one, other = await asyncio.gather(
        *(asyncio.to_thread(llm.generate, "Once upon a time", GREEDY) for _ in range(2))
    )
    assert one[0].text == other[0].text != ""


def test_calls_share_a_bar_of_the_caller(stories, capsys):
    llm = LLM(str(stories), max_num_seqs=2, num_blocks=64, max_model_len=64)
    with tqdm(total=3) as bar:
        llm.generate(["Once upon a time", "One day"], GREEDY, progress=bar)
        assert bar.n == 2 and not bar.disable
        llm.generate("Tom", GREEDY, progress=bar)
    assert bar.n == 3
    llm.generate("Tom", GREEDY, progress=False)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "1/1" not in shown and "tokens" not in shown


@pytest.mark.parametrize(("has_widgets", "kind"), [(True, "notebook"), (False, "text")])
def test_bars_are_widgets_if_ipywidgets_is_installed(tmp_path, has_widgets, kind):
    if has_widgets:
        (tmp_path / "ipywidgets.py").write_text(WIDGETS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", IN_A_KERNEL],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kind
