"""S3: the settings of the AWS tools, the two clients made from them (boto3 and Arrow), and the meaning of their errors.

Credentials, region and endpoint come from the sources of the AWS tools: the environment (AWS_PROFILE, AWS_ENDPOINT_URL, ...),
the profiles in ~/.aws, or the machine's role. They are not stored here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow.fs as pafs

from batchspec.data.storage import retry
from batchspec.data.storage.retry import reason
from batchspec.errors import ConfigError, InputError, StorageError

DENIED = ("AccessDenied", "Forbidden", "403", "401", "InvalidAccessKeyId", "SignatureDoesNotMatch")
SENT_AGAIN = ("SlowDown", "RequestTimeout", "BadDigest", "Throttling", "InternalError", "ConditionalRequestConflict")
"""Codes of errors that may be temporary, whatever their status: too fast, too slow, damaged in transit, or two conditional
requests at once."""
GONE = "{name} is not there any more; put it back or leave it out of input.path"
NO_BUCKET = "{where}: there is no bucket {bucket}; make it or name another"


SAID = ("ETag", "ContentLength", "IsTruncated", "KeyCount", "Name")
"""Every complete answer has one of these headers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all clients of one store must agree on; None leaves the choice to the AWS tools."""

    endpoint: str | None
    region: str | None
    anonymous: bool
    """Whether requests are not signed, for a public bucket."""


def settings() -> Settings:
    """Endpoint and region of the environment, or else of the profile. Raises ConfigError without boto3 or for an unknown
    profile."""
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        raise ConfigError("s3:// paths need boto3, which is not installed; pip install 'boto3>=1.36'") from None
    try:
        profile = botocore.session.get_session().get_scoped_config()
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"AWS settings: {reason(error)}; check AWS_PROFILE and ~/.aws/config") from error
    environ = os.environ
    return Settings(
        environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or profile.get("endpoint_url"),
        environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or profile.get("region"),
        environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"),
    )


def filesystem(bucket: str, attempts: int = 1) -> pafs.FileSystem:
    """Arrow's file system for S3, for reading; `attempts` is how often it sends a request itself.

    Raises InputError if the bucket does not exist and its region had to be looked up; ConfigError, StorageError.
    """
    place = settings()
    region = place.region
    if region is None and place.endpoint is None:
        try:
            region = pafs.resolve_s3_region(bucket)
        except OSError as error:
            if str(error) == f"Bucket '{bucket}' not found":  # Arrow's only sign of it
                raise InputError(NO_BUCKET.format(where=f"s3://{bucket}", bucket=bucket)) from error
            raise StorageError(f"s3://{bucket}: no answer ({reason(error)}); check the bucket's name and the network") from error
    scheme, mark, host = (place.endpoint or "https://").partition("://")
    if scheme not in ("http", "https") or not mark:
        raise ConfigError(
            f"AWS settings: an endpoint that begins with {scheme[:12]}; let AWS_ENDPOINT_URL be like https://host:port"
        )
    return pafs.S3FileSystem(
        anonymous=place.anonymous,
        region=region,
        scheme=scheme,
        endpoint_override=host.rstrip("/") or None,
        connect_timeout=retry.CONNECT_S,
        request_timeout=retry.REQUEST_S,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=attempts),
    )


def client() -> Any:
    """boto3's client. It does not retry: `retried` does."""
    return _made(settings(), os.environ.get("AWS_PROFILE"), retry.CONNECT_S, retry.REQUEST_S)


@cache  # making one costs a tenth of a second; any number of threads may share it
def _made(place: Settings, profile: str | None, connect_s: float, request_s: float) -> Any:
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    signing = {"signature_version": UNSIGNED} if place.anonymous else {}
    config = Config(
        **signing,
        connect_timeout=connect_s,
        read_timeout=request_s,
        retries={"total_max_attempts": 1},
        # Not all stores know the checksums that came after Content-MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "auto" if place.endpoint is None else "path"},
    )
    try:
        session = boto3.session.Session(profile_name=profile)
        made = session.client("s3", endpoint_url=place.endpoint, region_name=place.region, config=config)
    except ValueError as error:
        raise ConfigError(f"AWS settings: {reason(error)}; check AWS_ENDPOINT_URL, such as https://host:port") from error
    # If a connection ends within the headers of a `100 Continue`, botocore (1.44, awsrequest.py) reads for ever.
    made.meta.events.register("before-call.s3", _without_expect)
    return made


def _without_expect(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def passing(error: Exception) -> bool:
    """Whether a request of boto3 that raised this may succeed if it is sent again."""
    import botocore.exceptions as boto
    from urllib3.exceptions import HTTPError

    if isinstance(error, boto.ClientError):
        number, code = status(error) or 0, _code(error)
        return code in SENT_AGAIN or number in (408, 409, 429) or number >= 500
    return isinstance(error, boto.HTTPClientError | boto.ConnectionError | boto.IncompleteReadError | HTTPError)


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of boto3, if it is complete. boto3 treats an answer that was cut within its headers as an empty success: such a
    request must be sent again.
    """
    if answer.keys().isdisjoint(SAID):
        from urllib3.exceptions import ProtocolError

        raise ProtocolError("the answer was cut within its headers")
    return answer


def head(bucket: str, key: str) -> tuple[int, str]:
    """(size in bytes, ETag) of an object. Raises InputError if there is none; StorageError."""
    import botocore.exceptions

    what = f"looking for s3://{bucket}/{key}"
    try:
        found = retry.retried(what, lambda: whole(client().head_object(Bucket=bucket, Key=key)), passing)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        if status(error) == 404:
            raise InputError(GONE.format(name=f"s3://{bucket}/{key}")) from error
        raise StorageError(f"{what} failed: {refusal(error)}; run the same command again after that") from error
    return int(found["ContentLength"]), str(found["ETag"])


def no_bucket(error: Exception) -> bool:
    """Whether boto3 says that there is no such bucket, or that its name is invalid."""
    import botocore.exceptions as boto

    return isinstance(error, boto.ParamValidationError) or _code(error) == "NoSuchBucket"


def status(error: Exception) -> int | None:
    """HTTP status, if there was an answer."""
    response = getattr(error, "response", None) or {}
    number: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return number


def refusal(error: Exception) -> str:
    """What the store rejected and what to do about it; never its whole answer, which may quote what was signed."""
    code = _code(error) or type(error).__name__
    if code in DENIED or "Credential" in code or "Token" in code:
        keys = "AWS_PROFILE, AWS_ACCESS_KEY_ID, ...; AWS_SKIP_SIGNATURE=true for a public bucket"
        return f"access denied ({code}); check the credentials ({keys}) and the bucket's policy"
    return f"{code}: {reason(error)}; check the bucket and the store"


def _code(error: Exception) -> str:
    """The store's error code; empty if there was no answer."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
