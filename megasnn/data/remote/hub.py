"""Files of Hugging Face's hub, by HTTP.

webdataset starts `curl` for them, with the token where all users of the machine see it, and no word of why it fails.
"""

from __future__ import annotations

import threading

from megasnn.data.remote.http import fetch_http
from megasnn.data.remote.incoming import FetchError, Incoming, Interrupted, persist

TRIES = 3
_LOG_IN = "if it is private, log in with `hf auth login`, or set HF_TOKEN"


def fetch_from_hub(url: str, incoming: Incoming, seconds: float, stop: threading.Event) -> None:
    """Fetches a file of hf://; arguments and errors as of `fetch_http`."""
    found: list[str] = []
    persist(lambda: found.append(_address(url, incoming.name)), incoming, TRIES, stop)
    try:
        fetch_http(found[0], incoming, seconds, stop, _authorization())
    except FetchError as error:
        if any(f"the server answers {status} " in str(error) for status in (401, 403)):
            raise type(error)(f"{error}; {_LOG_IN}") from None
        raise


def _address(url: str, name: str) -> str:
    """Where the hub has a file. It is asked whether it has the repository and the revision."""
    try:
        from huggingface_hub import HfFileSystem, hf_hub_url
    except ImportError as error:
        raise FetchError(f"cannot fetch {name}: {error}; pip install huggingface_hub") from None
    try:
        path = HfFileSystem().resolve_path(url)
    except (FileNotFoundError, NotImplementedError, ValueError) as error:
        raise FetchError(f"cannot fetch {name}: {error}; correct the address, or, {_LOG_IN}") from None
    except Exception as error:  # of requests, or of httpx: it depends on the version
        raise Interrupted(f"the hub cannot be asked: {type(error).__name__}: {error}") from None
    return hf_hub_url(path.repo_id, path.path_in_repo, repo_type=path.repo_type, revision=path.revision)


def _authorization() -> str:
    from huggingface_hub import get_token

    token = get_token()
    return f"Bearer {token}" if token else ""
