//! Generates `docs/reference/errors.md`: every error with its status. See docs/decisions/0099.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use muster_testing::assert_committed;
use muster_types::ids::InstanceId;

use super::*;

/// Returns an example of every error, and what a caller can do about it.
fn errors() -> Vec<(Error, &'static str)> {
    let text = String::new;
    let errors = vec![
        Error::Invalid(text()),
        Error::TooLong(text()),
        Error::Unauthenticated(text()),
        Error::Forbidden(text()),
        Error::NotFound(text()),
        Error::NotReady(text()),
        Error::Conflict(text()),
        Error::Busy { text: text(), retry_after: 1 },
        Error::PreconditionFailed(text()),
        Error::Mismatch(text()),
        Error::AddressInUse(Ipv4Addr::LOCALHOST),
        Error::LengthRequired(text()),
        Error::TooLarge(text()),
        Error::TooManyRequests { text: text(), retry_after: 1 },
        Error::Timeout(text()),
        Error::InsufficientCapacity(text()),
        Error::Unschedulable { text: text(), stage: SchedulingStage::PreSchedule, transient: true },
        Error::InstanceFailed { instance: InstanceId::new(), error: Box::new(Error::Conflict(text())) },
        Error::Contended,
        Error::Unavailable(text()),
        Error::StaleEpoch(text()),
        Error::PortInUse(text()),
        Error::NotConfigured(text()),
        Error::Internal(text()),
    ];
    errors
        .into_iter()
        .map(|error| {
            let advice = advice(&error);
            (error, advice)
        })
        .collect()
}

fn advice(error: &Error) -> &'static str {
    match error {
        Error::Invalid(_) => "Correct the field that the text names.",
        Error::TooLong(_) => "Shorten the value.",
        Error::Unauthenticated(_) => {
            "Log in again. If that fails, too, the key is wrong, expired or deleted: ask for a new one."
        }
        Error::Forbidden(_) => {
            "Use a key with the scope that the text names, or of the namespace that may do this, or ask for a higher quota."
        }
        Error::NotFound(_) => {
            "Check the name and the namespace. Objects of other namespaces do not exist for a caller that may not see them."
        }
        Error::NotReady(_) => "Repeat the request after `Retry-After`, or wait for the state with `?wait=`.",
        Error::Conflict(_) => "Read the object, and request what its state allows.",
        Error::Busy { .. } => "Repeat the request after `Retry-After`.",
        Error::PreconditionFailed(_) => "Read the object again and decide again.",
        Error::Mismatch(_) => "Use a new `Idempotency-Key` for another request.",
        Error::AddressInUse(_) => "Choose another address, or none: a free one is then chosen.",
        Error::LengthRequired(_) => "Send the header `Content-Length`.",
        Error::TooLarge(_) => "Send less at once, such as smaller chunks of an upload.",
        Error::TooManyRequests { .. } => "Wait for `Retry-After`, and send fewer requests.",
        Error::Timeout(_) => "Send the whole request without a pause.",
        Error::InsufficientCapacity(_) => {
            "Delete what is not used, or add capacity. Repeating helps when others release theirs."
        }
        Error::Unschedulable { .. } => {
            "`muster instance why` shows what each node lacks. If `transient` is true, repeat the request later."
        }
        Error::InstanceFailed { .. } => {
            "The instance in `instance_uuid` has the reason; delete it and correct the cause. The status is that of the cause."
        }
        Error::Contended | Error::Unavailable(_) | Error::StaleEpoch(_) | Error::PortInUse(_) => {
            "Repeat the request after `Retry-After`, with the same `Idempotency-Key`; clients with several URLs use another one."
        }
        Error::NotConfigured(_) => "The operator sets what the text names.",
        Error::Internal(_) => {
            "The log of the daemon has the reason with the id of the request. Report it: this should not happen."
        }
    }
}

/// Returns the names and the descriptions of the variants in the source code of the errors.
fn descriptions() -> BTreeMap<String, String> {
    let source = include_str!("../../../types/src/error.rs");
    let (_, variants) = source.split_once("pub enum Error {").unwrap();
    let (variants, _) = variants.split_once("\n}\n").unwrap();
    let (mut found, mut text) = (BTreeMap::new(), String::new());
    for line in variants.lines().map(str::trim) {
        if let Some(part) = line.strip_prefix("///") {
            text.push_str(part);
        } else if line.starts_with(|c: char| c.is_ascii_uppercase()) {
            let name = line.split(|c: char| !c.is_alphanumeric()).next().unwrap();
            found.insert(name.to_owned(), std::mem::take(&mut text).trim().to_owned());
        }
    }
    found
}

fn name(error: &Error) -> String {
    let text = format!("{error:?}");
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned()
}

#[test]
fn errors_page_is_current() {
    let descriptions = descriptions();
    let mut rows: BTreeMap<u16, Vec<String>> = BTreeMap::new();
    let mut count = 0;
    for (error, advice) in errors() {
        let description = &descriptions[&name(&error)];
        let varies = matches!(error, Error::InstanceFailed { .. });
        let response = ApiError(error).into_response();
        let retry = response.headers().get(header::RETRY_AFTER).map_or("", |_| "yes");
        let status = response.status();
        let shown = if varies {
            "that of the cause".to_owned()
        } else {
            format!("{} {}", status.as_u16(), status.canonical_reason().unwrap())
        };
        let row = format!("| {shown} | {description} | {retry} | {advice} |\n");
        rows.entry(if varies { u16::MAX } else { status.as_u16() }).or_default().push(row);
        count += 1;
    }
    assert_eq!(count, descriptions.len(), "every error has an example");
    let rows: String = rows.into_values().flatten().collect();
    let page = format!(
        "# Errors\n\nThis page is generated from the source code of this version. The body of every error has `error`, the reason for \
         people, `status`, and `request_id`, which events and the log contain, too. With `Retry-After`, the header says in how many \
         seconds a repetition may succeed. Which exit code `muster` has for a status is in \
         [The command line](../cli.md#exit-codes).\n\n\
         | status | meaning | `Retry-After` | what to do |\n|---|---|---|---|\n{rows}"
    );
    assert_committed("docs/reference/errors.md", &page, "-p muster-api errors_page");
}
