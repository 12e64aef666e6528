//! The exit codes of the program. docs/cli.md documents them.

use std::process::ExitCode;

use clap::ValueEnum;

use crate::api::Error;

/// Why the program ended. The number is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[repr(u8)]
pub enum Outcome {
    /// The command failed, and none of the other codes applies
    Failed = 1,
    /// The command line is invalid
    Usage = 2,
    /// The server refused the request: invalid, not permitted, or over a quota
    Refused = 3,
    /// The object does not exist, or you may not see it
    NotFound = 4,
    /// The request conflicts with the state of the object
    Conflict = 5,
    /// The server is not reachable, overloaded or short of capacity: try again later
    Unavailable = 6,
    /// The work was not completed in time, and may continue
    Timeout = 7,
    /// `muster apply --dry-run` found differences
    Different = 8,
    /// The node of the daemon was deleted from the cluster
    NodeDeleted = 9,
    /// Interrupted by Ctrl-C or another signal
    Interrupted = 130,
}

/// An error with a known outcome.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct CommandError {
    outcome: Outcome,
    text: String,
}

/// Creates an error with a known outcome.
#[must_use]
pub fn error_with_outcome(outcome: Outcome, text: String) -> anyhow::Error {
    CommandError { outcome, text }.into()
}

/// Creates the error of a command that did not wait until its work was completed.
pub fn timed_out(text: impl Into<String>) -> anyhow::Error {
    error_with_outcome(Outcome::Timeout, text.into())
}

/// Creates the error of a command that a signal has interrupted.
pub fn interrupted(text: impl Into<String>) -> anyhow::Error {
    error_with_outcome(Outcome::Interrupted, text.into())
}

impl Outcome {
    /// Returns the outcome of a failed command.
    #[must_use]
    pub fn of(error: &anyhow::Error) -> Self {
        if let Some(error) = error.chain().find_map(|cause| cause.downcast_ref::<CommandError>()) {
            return error.outcome;
        }
        error.chain().find_map(|cause| cause.downcast_ref::<Error>()).map_or(Self::Failed, Self::of_call)
    }

    /// Returns the outcome of a failed call.
    fn of_call(error: &Error) -> Self {
        match error {
            Error::InvalidInput(_) => Self::Usage,
            Error::UnknownFormat(_) | Error::UnexpectedResponse { .. } => Self::Failed,
            Error::Unreachable { .. } => Self::Unavailable,
            Error::NotPlaced { transient: false, .. } => Self::Refused,
            // The namespace to log in to is not an object of the command.
            Error::LoginRefused { status: 404, .. } => Self::Refused,
            Error::LoginRefused { .. }
            | Error::NotAllowed { .. }
            | Error::Refused { .. }
            | Error::NotFound { .. }
            | Error::NotPlaced { .. } => match error.status().unwrap_or_default() {
                404 => Self::NotFound,
                408 => Self::Timeout,
                409 | 412 => Self::Conflict,
                // 406 is "not ready yet", and 507 "no capacity".
                406 | 429 | 500..=599 => Self::Unavailable,
                _ => Self::Refused,
            },
        }
    }

    /// Returns the table of exit codes for the help text.
    #[must_use]
    pub fn help() -> String {
        let lines = Self::value_variants().iter().map(|outcome| {
            let value = outcome.to_possible_value();
            let help = value.as_ref().and_then(|value| value.get_help()).map(ToString::to_string);
            format!("  {}  {}\n", *outcome as u8, help.unwrap_or_default())
        });
        format!("Exit codes:\n  0  Success\n{}", lines.collect::<String>())
    }
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        (outcome as u8).into()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;

    #[test]
    fn statuses_have_distinct_outcomes() {
        let refused = |status| Outcome::of_call(&Error::Refused { status, message: String::new() });
        let expected = [
            (400, Outcome::Refused),
            (401, Outcome::Refused),
            (403, Outcome::Refused),
            (404, Outcome::NotFound),
            (406, Outcome::Unavailable),
            (408, Outcome::Timeout),
            (409, Outcome::Conflict),
            (412, Outcome::Conflict),
            (422, Outcome::Refused),
            (429, Outcome::Unavailable),
            (503, Outcome::Unavailable),
            (507, Outcome::Unavailable),
        ];
        for (status, outcome) in expected {
            assert_eq!(refused(status), outcome, "{status}");
        }
        let unreachable = Error::Unreachable { url: String::new(), reason: String::new() };
        assert_eq!(Outcome::of_call(&unreachable), Outcome::Unavailable);
    }

    #[test]
    fn context_does_not_hide_the_outcome() {
        let error: anyhow::Result<()> = Err(timed_out("timed out")).context("failed to delete web");
        assert_eq!(Outcome::of(&error.unwrap_err()), Outcome::Timeout);
        assert_eq!(Outcome::of(&anyhow::anyhow!("other")), Outcome::Failed);
    }

    #[test]
    fn documentation_lists_every_exit_code() {
        let page = include_str!("../../docs/cli.md");
        for line in Outcome::help().lines().skip(1) {
            let (code, meaning) = line.trim().split_once("  ").unwrap();
            assert!(page.contains(&format!("| {code} | {meaning} |")), "docs/cli.md lacks {line:?}");
        }
    }
}
