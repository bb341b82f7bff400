"""The programs that fetch from object stores: how each is called, and what its errors mean.

webdataset has the same commands, but no opener for s3://; and `aws s3 cp --quiet`, which its pages tell people to
write, hides why it fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

URL = "URL"
"""Stands in a command for what is fetched."""


@dataclass(frozen=True)
class Program:
    """
    Attributes:
        command: writes a file to standard output.
        install: what to install, and from where. log_in: how one gives it credentials.
        not_there: finds, in what it writes to standard error, that there is no such file. None where that cannot be
            told from its other errors.
    """

    command: tuple[str, ...]
    install: str
    log_in: str
    not_there: re.Pattern[str] | None = None

    def hint(self, errors: str) -> str:
        """What to do about an error, behind a "; "; "" where nothing is known."""
        return f"; {self.log_in}" if _CREDENTIALS.search(errors) else ""


_CREDENTIALS = re.compile(
    r"credential|denied|forbidden|unauthori[sz]ed|authenticat|anonymous|expired|invalid.?token|access.?key"
    r"|\b40[13]\b",
    re.IGNORECASE,
)

GSUTIL = Program(
    ("gsutil", "cat", URL),
    "the Google Cloud CLI, cloud.google.com/sdk",
    "log in with `gcloud auth login`, or set BOTO_CONFIG to a file of credentials",
    # The second one is that of `gcloud storage`, which gsutil calls where it is told to (use_gcloud_storage).
    re.compile("No URLs matched|matched no objects"),
)
AWS = Program(
    ("aws", "s3", "cp", "--only-show-errors", URL, "-"),
    "the AWS CLI, pip install awscli",
    "log in with `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    re.compile(r"\(404\) when calling|\(NoSuchKey\)"),
)
AIS = Program(
    ("ais", "get", URL, "-"),
    "the CLI of AIStore, github.com/NVIDIA/aistore",
    "set AIS_ENDPOINT to the cluster, and AIS_AUTHN_TOKEN_FILE to a file with a token",
)
CURL = Program(
    ("curl", "--connect-timeout", "30", "--fail", "--silent", "--show-error", "--location", URL),
    "curl.se, with the protocol of the URL",
    "give user and password as sftp://user:password@host",
    re.compile(r"curl: \(78\)"),  # "The resource referenced in the URL does not exist."
)
OF_OPENERS: Mapping[str, Program] = MappingProxyType({"gopen_gsutil": GSUTIL, "gopen_ais": AIS, "gopen_curl": CURL})
"""By the name of webdataset's opener that would start it."""
