//! The checks of a host, which `muster doctor`, `muster node show` and the web UI report.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::object::string_enum;

string_enum! {
    /// The result of a check of a host.
    CheckState {
        /// The host has what is checked.
        Passed = "ok",
        /// Something works less well than it could.
        Warning = "warning",
        /// Something does not work.
        Failed = "failed",
    }
}

/// A check of a host and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostCheck {
    /// The name of the check.
    pub name: String,
    /// The result.
    pub state: CheckState,
    /// What the check found.
    pub detail: String,
    /// What does not work, or works less well, if the check does not pass.
    pub affects: String,
    /// The command that fixes it; `null` if there is nothing to fix, or no command does it.
    #[serde(default)]
    pub fix: Option<String>,
}

impl HostCheck {
    /// Creates a check that passed.
    #[must_use]
    pub fn passed(name: &str, affects: &str, detail: impl Into<String>) -> Self {
        Self::new(name, affects, CheckState::Passed, detail)
    }

    /// Creates a check that found something that works less well than it could.
    #[must_use]
    pub fn warning(name: &str, affects: &str, detail: impl Into<String>) -> Self {
        Self::new(name, affects, CheckState::Warning, detail)
    }

    /// Creates a check that found something that does not work.
    #[must_use]
    pub fn failed(name: &str, affects: &str, detail: impl Into<String>) -> Self {
        Self::new(name, affects, CheckState::Failed, detail)
    }

    fn new(name: &str, affects: &str, state: CheckState, detail: impl Into<String>) -> Self {
        Self { name: name.into(), state, detail: detail.into(), affects: affects.into(), fix: None }
    }

    /// Sets the command that fixes it.
    #[must_use]
    pub fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }
}
