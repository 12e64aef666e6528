//! Sanitized text from guests.

use muster_types::guest::AgentState;

/// The maximum length of guest text in a state or version, in characters.
pub(super) const MAX_STATE_CHARS: usize = 100;

/// The maximum length of guest text in an error, in characters.
pub(super) const MAX_ERROR_CHARS: usize = 400;

/// The reason shown when a guest reports a failure without one.
const NO_REASON: &str = "the guest gave no reason";

/// Removes control characters, which a terminal would interpret, and truncates the text.
pub(super) fn printable(text: &str, max_chars: usize) -> String {
    text.chars().filter(|character| !character.is_control()).take(max_chars).collect()
}

/// Returns the reason of a failure that a guest reported, for display.
pub(super) fn failure_reason(text: &str) -> String {
    let reason = printable(text, MAX_ERROR_CHARS);
    if reason.is_empty() { NO_REASON.into() } else { reason }
}

/// Returns the agent state for the result and the message of `is-system-running`, which are those of systemd.
pub(super) fn system_state(is_running: bool, message: &str) -> AgentState {
    match (is_running, message.trim()) {
        (_, "degraded") => AgentState::Degraded,
        (true, _) => AgentState::Ready,
        (false, "") => AgentState::NotReady("unknown".into()),
        (false, message) => AgentState::NotReady(printable(message, MAX_STATE_CHARS)),
    }
}
