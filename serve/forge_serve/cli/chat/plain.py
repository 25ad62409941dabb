"""Answers as they are: for pipes, files and terminals that cannot move the cursor."""

from __future__ import annotations

from forge_serve.cli.terminal import Answer


class PlainText:
    """Output of one answer as text. Its reasoning appears on terminals only."""

    def __init__(self) -> None:
        self._answer = Answer()
        self._thinking = False  # the last piece was reasoning
        self._wrote = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._wrote:
            self._answer.write("\n")

    def thought(self, piece: str) -> None:
        if piece and self._answer.on_terminal:
            self._answer.write(piece, dim=True)
            self._thinking = self._wrote = True

    def text(self, piece: str) -> None:
        if piece and self._thinking:
            self._answer.write("\n\n")
            piece, self._thinking = piece.lstrip("\n"), False
        self._answer.write(piece)
        self._wrote = self._wrote or bool(piece)
