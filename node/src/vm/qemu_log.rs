//! Interprets the messages of QEMU. It has no error codes, so this is the one place that matches their text.

/// The maximum length of a QEMU message in an error, in characters.
const MAX_MESSAGE_LEN: usize = 400;

/// Messages about conditions that may be different at the next attempt.
const TRANSIENT_MESSAGES: [&str; 4] =
    ["Cannot allocate memory", "cannot allocate memory", "Resource temporarily", "Failed to get"];

/// Why QEMU exited during start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartFailure {
    /// A retry may succeed.
    Transient,
    /// The plan cannot work on this host.
    Permanent,
}

/// Classifies the failure of a start; `message` is the [`last_error`] of its log.
pub(super) fn classify_start_failure(message: &str) -> StartFailure {
    if TRANSIENT_MESSAGES.iter().any(|text| message.contains(text)) {
        StartFailure::Transient
    } else {
        StartFailure::Permanent
    }
}

/// Returns whether the message of a failed start means that another process has locked a disk.
pub(super) fn is_locked(message: &str) -> bool {
    message.contains("Failed to get") && message.contains("lock")
}

/// Returns whether the message of a failed job means that the file system is full.
pub(super) fn is_disk_full(message: &str) -> bool {
    message.contains("No space left")
}

/// Returns the last error in a log, without the option that caused it. Errors of QEMU itself take precedence over
/// output of its libraries.
pub(super) fn last_error(log: &str) -> Option<String> {
    let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let own = lines.iter().filter_map(|line| line.strip_prefix("qemu-system-x86_64: "));
    let mut own = own.filter(|line| !line.starts_with("warning: ") && !line.starts_with("info: "));
    let line = own.next_back().or(lines.last().copied())?;
    // An invalid option precedes the message, including its whole value.
    let line = match line.strip_prefix('-') {
        Some(rest) => {
            rest.rsplit_once("}: ").or_else(|| rest.split_once(": ")).map_or(line, |(_, message)| message)
        }
        None => line,
    };
    // The PID of the sender of a signal is internal to the host.
    let line = line.split(" from pid ").next().unwrap_or(line);
    Some(line.chars().take(MAX_MESSAGE_LEN).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_last_error_of_qemu() {
        let text = "qemu-system-x86_64: warning: slow\nqemu-system-x86_64: -device {\"driver\":\"x\",\"a\":{}}: 'x' is not a valid device model name\n";
        assert_eq!(last_error(text).unwrap(), "'x' is not a valid device model name");
        let text = "qemu-system-x86_64: -spice addr=::1,port=1: failed to initialize\nqemu-system-x86_64: info: Spice: x\n";
        assert!(last_error(text).unwrap().contains("failed to initialize"));
        let text = "qemu-system-x86_64: terminating on signal 15 from pid 7 (systemd)\n";
        assert_eq!(last_error(text).unwrap(), "terminating on signal 15");
        assert_eq!(last_error("library: broken\n\n").unwrap(), "library: broken");
        assert_eq!(last_error("\n"), None);
    }

    #[test]
    fn classifies_start_failures() {
        assert_eq!(classify_start_failure("Cannot allocate memory"), StartFailure::Transient);
        assert_eq!(classify_start_failure("Invalid CPU topology"), StartFailure::Permanent);
    }
}
