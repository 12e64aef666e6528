//! The consoles that clients of this daemon have open. See docs/decisions/0080.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use muster_types::time::now;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::StreamKey;

/// The open consoles by the keys that opened them.
#[derive(Debug, Clone, Default)]
pub struct ConsoleSessions {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: Mutex<Sessions>,
    /// Notified when a console is opened.
    opened: Notify,
}

#[derive(Debug, Default)]
struct Sessions {
    next: u64,
    open: HashMap<u64, OpenSession>,
}

/// A key, and the nonce that it had when a console was opened.
pub(crate) type KeyVersion = (StreamKey, Option<String>);

#[derive(Debug)]
struct OpenSession {
    key: KeyVersion,
    is_ended: watch::Sender<bool>,
}

/// A console, which counts as open while this exists.
#[derive(Debug)]
pub struct ConsoleSession {
    sessions: ConsoleSessions,
    id: u64,
    is_ended: watch::Receiver<bool>,
    /// Unix time at which the browser session of the caller ends.
    session_end: Option<f64>,
}

impl ConsoleSession {
    /// Waits until the client may not use the console any longer: its key was deleted, replaced or has expired, or its browser
    /// session has. Other tokens can be renewed with their key, so their expiry does not matter.
    pub async fn ended(mut self) {
        let session_end = self.session_end;
        let expiry = async {
            match session_end {
                Some(end) => tokio::time::sleep(Duration::from_secs_f64((end - now()).max(0.0))).await,
                None => std::future::pending().await,
            }
        };
        let ended = async { drop(self.is_ended.wait_for(|is_ended| *is_ended).await) };
        tokio::select! {
            () = ended => {}
            () = expiry => {}
        }
    }
}

impl Drop for ConsoleSession {
    fn drop(&mut self) {
        self.sessions.inner.sessions.lock().open.remove(&self.id);
    }
}

impl ConsoleSessions {
    /// Registers a console that is opened with a key which has a nonce, in a browser session that ends at `session_end`.
    pub(crate) fn open(
        &self,
        key: StreamKey,
        nonce: Option<String>,
        session_end: Option<f64>,
    ) -> ConsoleSession {
        let key = (key, nonce);
        let (sender, is_ended) = watch::channel(false);
        let mut sessions = self.inner.sessions.lock();
        let id = sessions.next;
        sessions.next += 1;
        sessions.open.insert(id, OpenSession { key, is_ended: sender });
        self.inner.opened.notify_one();
        ConsoleSession { sessions: self.clone(), id, is_ended, session_end }
    }

    /// Waits until a console was opened since the last call.
    pub(crate) async fn opened(&self) {
        self.inner.opened.notified().await;
    }

    /// Returns the keys that have opened consoles.
    pub(crate) fn keys(&self) -> HashSet<KeyVersion> {
        self.inner.sessions.lock().open.values().map(|session| session.key.clone()).collect()
    }

    /// Ends the consoles that a key has opened.
    pub(crate) fn end(&self, key: &KeyVersion) {
        for session in self.inner.sessions.lock().open.values().filter(|session| session.key == *key) {
            session.is_ended.send_replace(true);
        }
    }
}
