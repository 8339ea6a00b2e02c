"""The line of an error's message that says what happened.

Keras, AutoGraph and TensorFlow put the message of the error itself into one of their
own, which begins with where they were.
"""

import re

# The most characters of a line that is shown.
_LONGEST = 500

# Keras: its head, the message, and the arguments of the call.
_OF_CALL = re.compile(
    r"Exception encountered when calling [^\n]*\n\n(.*?)"
    r"(?=\n\nArguments received by |\Z)",
    re.DOTALL,
)
# Keras, where it calls a layer without data to know the shape of what it returns.
_OF_SHAPES = re.compile(
    r"Could not automatically infer the output shape .*?Error encountered:\n\n",
    re.DOTALL,
)
# AutoGraph: lines of code, each indented further, and the error with its name.
_IN_USER_CODE = re.compile(
    r"in user code:\n(?:\n|    File [^\n]*\n|     [^\n]*\n)*    (?=\S)"
)
# TensorFlow: where each node was made, whose lines are indented, and the message.
_IN_GRAPH = re.compile(
    r"Graph execution error:\n(?:\n|Detected at node [^\n]*\n|Node: [^\n]*\n"
    r"|<stack traces unavailable>\n|[ \t][^\n]*\n"
    r"|\d+ root error\(s\) found\.\n)*(?:\(0\)\s*(?:\w+:)?\s*)?"
)
_NODE = re.compile(r"\{\{function_node [^}]*\}\} ?")
_OPERATION = re.compile(r" \[Op:\w+\](?: name: ?)?$", re.MULTILINE)
_COLORS = re.compile(r"\x1b\[[\d;]*m")


def telling_line(kind: str, message: str) -> str:
    """Name and message of an error in one line: the one that helps.

    Args:
        kind: Name of the error's class.
        message: Its message.

    >>> telling_line("ValueError", "in user code:\\n\\n    ValueError: No tea.\\n")
    'ValueError: No tea.'
    """
    text = _COLORS.sub("", message)
    before = None
    while before != text:  # one may be inside of the other
        before = text
        text = _OF_CALL.sub(lambda found: found[1], text, count=1)
        text = _OF_SHAPES.sub("", text, count=1)
        text = _IN_USER_CODE.sub("", text, count=1)
        text = _IN_GRAPH.sub("", text, count=1)
        text = _NODE.sub("", text)
        text = _OPERATION.sub("", text)
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    line = line.removeprefix(f"{kind}: ")
    if len(line) > _LONGEST:
        line = f"{line[:_LONGEST]} …"
    return f"{kind}: {line}" if line else kind
