//! The interactive sessions of this daemon.

use std::collections::HashMap;
use std::sync::Arc;

use muster_types::{Error, Result};
use parking_lot::Mutex;

/// The maximum number of sessions. Each takes up to half a megabyte.
const MAX_SESSIONS: usize = 256;
/// The maximum number of sessions of one namespace.
const MAX_NAMESPACE_SESSIONS: usize = 32;
/// Seconds after which a caller may retry.
const RETRY_AFTER: u64 = 30;

/// Counts interactive sessions by namespace.
#[derive(Debug, Clone, Default)]
pub struct TerminalSessions(Arc<Mutex<HashMap<String, usize>>>);

/// Counts as one session while it exists.
#[derive(Debug)]
pub struct SessionPermit {
    sessions: TerminalSessions,
    namespace: String,
}

impl TerminalSessions {
    /// Counts a session, unless there are too many.
    pub(crate) fn acquire(&self, namespace: &str) -> Result<SessionPermit> {
        let mut counts = self.0.lock();
        let own = counts.get(namespace).copied().unwrap_or_default();
        let refuse = |text: String| Err(Error::TooManyRequests { text, retry_after: RETRY_AFTER });
        if own >= MAX_NAMESPACE_SESSIONS {
            return refuse(format!(
                "the namespace has {own} interactive sessions on this node, which is the maximum; end one of them"
            ));
        }
        if counts.values().sum::<usize>() >= MAX_SESSIONS {
            return refuse(format!("the node has {MAX_SESSIONS} interactive sessions, which is the maximum"));
        }
        *counts.entry(namespace.to_owned()).or_default() += 1;
        Ok(SessionPermit { sessions: self.clone(), namespace: namespace.to_owned() })
    }
}

impl Drop for SessionPermit {
    fn drop(&mut self) {
        let mut counts = self.sessions.0.lock();
        if let Some(count) = counts.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.namespace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_sessions_of_each_namespace_and_of_all() {
        let sessions = TerminalSessions::default();
        let mut permits: Vec<_> =
            (0..MAX_NAMESPACE_SESSIONS).map(|_| sessions.acquire("red").unwrap()).collect();
        assert!(sessions.acquire("red").unwrap_err().to_string().contains("the namespace has 32"));
        permits.pop();
        permits.push(sessions.acquire("red").unwrap());
        for number in MAX_NAMESPACE_SESSIONS..MAX_SESSIONS {
            permits.push(sessions.acquire(&format!("n{number}")).unwrap());
        }
        assert!(sessions.acquire("blue").unwrap_err().to_string().contains("the node has 256"));
        drop(permits);
        assert!(sessions.0.lock().is_empty());
    }
}
