"""Which token lets whom in: decisions about what was asked, the tokens, and the time. It opens nothing."""

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from unicron.contracts.base import Record
from unicron.contracts.enrolment import Digest, JoinRequest, TokenId, TokenUse, TokenView
from unicron.contracts.events import NodeEnrolled
from unicron.contracts.queries import CreateToken
from unicron.errors import InvalidInputError
from unicron.jointoken import digest

KEPT_S = 30 * 86400.0
"""How long a token that is over is still shown."""

MOST_TOKENS = 10_000

CURE = "have somebody with the operator's key make one by `unicron token create`"


class Token(Record, kw_only=True, frozen=True):
    """A token that was made.

    Attributes:
        view: what anybody may see of it.
        digest: of its secret.
        revoked: whether it was taken back.
    """

    view: TokenView
    digest: Digest
    revoked: bool = False


class Book(Record, kw_only=True, frozen=True):
    """All that the enroller remembers besides the keys."""

    tokens: Annotated[dict[TokenId, Token], Meta(max_length=MOST_TOKENS)] = {}

    def added(self, order: CreateToken, now: float) -> "Book":
        """Return it with one more token, and without those that were over long ago; `now` in Unix seconds.

        Raises:
            InvalidInputError: there is one of that id, or there are too many.
        """
        if order.token in self.tokens:
            raise InvalidInputError(f"there is a token {order.token} already; make another one")
        kept = {name: token for name, token in self.tokens.items() if now < token.view.expires + KEPT_S}
        if len(kept) >= MOST_TOKENS:
            raise InvalidInputError(f"{len(kept)} tokens are kept, which is the most; make fewer, for more uses each")
        view = TokenView(
            token=order.token,
            pool=order.pool,
            state="valid",
            expires=now + order.seconds,
            uses=order.uses,
            machine=order.machine,
            by=order.by,
        )
        return Book(tokens={**kept, order.token: Token(view=view, digest=order.digest)})

    def revoked(self, name: str) -> "Book":
        """Return it with a token that lets nobody in any more.

        Raises:
            InvalidInputError: there is none of that id.
        """
        if name not in self.tokens:
            raise InvalidInputError(f"no token {name}; `unicron token list` shows all")
        return Book(tokens={**self.tokens, name: replace(self.tokens[name], revoked=True)})

    def views(self, now: float) -> list[TokenView]:
        """Return all tokens as they stand at `now`, the newest last."""
        return [replace(token.view, state=_state(token, now)) for token in self.tokens.values()]

    def admitted(self, request: JoinRequest, users: Mapping[str, str], now: float) -> "tuple[Book, NodeEnrolled]":
        """Return it with one more use of a token, and the fact that this let somebody in.

        Who asks again, because no answer came, has used it once.

        Args:
            request: of who wants to be let in.
            users: public keys of all who are known on the bus, by name.
            now: Unix seconds.

        Raises:
            InvalidInputError: the token does not let it in; says why, and the cure.
        """
        token = self._shown(request)
        view, asked = token.view, request.node
        again = users.get(asked) == request.public_key and any(use.node == asked for use in view.used)
        _check(token, request, now, again=again)
        used = view.used if again else [*view.used, TokenUse(node=asked, at=now)]
        fact = NodeEnrolled(
            node=asked,
            pool=view.pool,
            token=view.token,
            public_key=request.public_key,
            machine=request.machine,
            uses_left=view.uses - len(used),
        )
        return Book(tokens={**self.tokens, view.token: replace(token, view=replace(view, used=used))}), fact

    def _shown(self, request: JoinRequest) -> Token:
        token = self.tokens.get(request.token)
        if token is None:
            raise InvalidInputError(
                f"token {request.token} is unknown here: it is another cluster's, or long over; {CURE}"
            )
        if not hmac.compare_digest(token.digest, digest(request.secret)):
            raise InvalidInputError(
                f"token {request.token} has another secret than the one shown: it is forged; {CURE}"
            )
        return token


def _state(token: Token, now: float) -> str:
    if token.revoked:
        return "revoked"
    if now >= token.view.expires:
        return "expired"
    return "used up" if len(token.view.used) >= token.view.uses else "valid"


def _check(token: Token, request: JoinRequest, now: float, *, again: bool) -> None:
    """Refuse what the token does not allow."""
    view, state = token.view, _state(token, now)
    if state == "revoked":
        raise InvalidInputError(f"token {view.token} was revoked; {CURE}")
    if state == "expired":
        ended = datetime.fromtimestamp(view.expires, UTC).strftime("%Y-%m-%d %H:%M:%S")
        raise InvalidInputError(f"token {view.token} expired at {ended} UTC; {CURE}")
    if request.pool and request.pool != view.pool:
        raise InvalidInputError(
            f"token {view.token} is for pool {view.pool}, not for {request.pool}: leave UNICRON_POOL out, or show a "
            "token of that pool"
        )
    if view.machine and view.machine != request.machine:
        shown = request.machine or "none"
        raise InvalidInputError(f"token {view.token} is for machine {view.machine} alone, not for {shown}; {CURE}")
    if state == "used up" and not again:
        names = ", ".join(use.node for use in view.used[-8:])
        raise InvalidInputError(
            f"token {view.token} is used up: {len(view.used)} of {view.uses} came by it ({names}); {CURE}"
        )
