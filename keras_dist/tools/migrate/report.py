"""What is said about a line of a script."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """One line that needs a person, or that a person should know of.

    Attributes:
        line: Its number, from 1.
        reason: What is the matter with it.
        advice: What to write instead.
        is_left: Whether the line needs a change that was not made.
    """

    line: int
    reason: str
    advice: str
    is_left: bool = True

    def text(self, path: str) -> str:
        """As one line: file, line, reason and replacement.

        >>> Finding(3, "tf.placeholder is TensorFlow 1", "Use keras.Input").text("a.py")
        'a.py:3: not changed: tf.placeholder is TensorFlow 1. Use keras.Input.'
        """
        kind = "not changed" if self.is_left else "note"
        return f"{path}:{self.line}: {kind}: {self.reason}. {self.advice}."


@dataclass(frozen=True)
class Migrated:
    """A file after the rules.

    Attributes:
        source: Its new text, in the encoding and with the line ends of the old one.
        findings: What was left or should be known, by line.
    """

    source: bytes
    findings: tuple[Finding, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left for a person."""
        return not any(finding.is_left for finding in self.findings)
