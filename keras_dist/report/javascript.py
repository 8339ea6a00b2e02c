"""Vega-Lite, which draws the charts in the browser: a page contains all of it."""

import functools
import importlib.util
import subprocess
import sys

# A process of its own, since the module brings V8, which needs 160 MB. It makes one
# file of Vega, Vega-Lite and vega-embed, in 3 s.
_BUNDLE = "import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle())"
_SECONDS = 120


def check_installed() -> None:
    """Raise if a page cannot be made here.

    Raises:
        ImportError: If vl-convert-python is not installed.
    """
    if importlib.util.find_spec("vl_convert") is None:
        raise ImportError(
            "A page with charts needs vl-convert-python. Received: an environment "
            "without it. Run: pip install 'keras-dist[report]'; or name a file that "
            "ends with .json, for the numbers without a page."
        )


@functools.cache
def javascript() -> str:
    """The JavaScript of a page, as text for a `script` element.

    Raises:
        ImportError: If vl-convert-python is not installed.
        RuntimeError: If it cannot be used.
    """
    check_installed()
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", _BUNDLE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS,
        text=True,
        encoding="utf-8",
    )
    if done.returncode or not done.stdout:
        raise RuntimeError(
            "vl-convert-python gives no JavaScript for a page with charts. Received: "
            f"exit code {done.returncode}: {done.stderr.strip()[-500:]} "
            "Run: pip install --force-reinstall 'keras-dist[report]'"
        )
    # The text of a `script` element must not contain its end.
    return done.stdout.replace("</script", "<\\/script").replace("<!--", "<\\!--")
