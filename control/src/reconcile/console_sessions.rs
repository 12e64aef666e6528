//! Ends consoles whose keys were deleted, replaced or have expired. See docs/decisions/0080.

use std::sync::Arc;
use std::time::Duration;

use muster_types::Result;
use tokio::sync::watch;

use crate::app::App;
use crate::objects::ticket::find_key;

/// The interval between checks of the keys that consoles were opened with.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Checks the keys of open consoles until `stop` is set. Without consoles it sends no statement.
pub(super) async fn run(app: Arc<App>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        if app.console_sessions.keys().is_empty() {
            tokio::select! {
                () = app.console_sessions.opened() => {}
                _ = stop.changed() => {}
            }
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
            _ = stop.changed() => continue,
        }
        if let Err(error) = check_keys(&app).await {
            tracing::warn!(%error, "failed to check the keys of consoles");
        }
    }
}

async fn check_keys(app: &App) -> Result<()> {
    for version in app.console_sessions.keys() {
        let ((namespace, name), nonce) = &version;
        let found = find_key(app, namespace, name).await?;
        // A daemon of an earlier release forwards requests without the nonce. It checks that by itself.
        if found.is_none_or(|key| nonce.as_ref().is_some_and(|nonce| *nonce != key.nonce)) {
            app.console_sessions.end(&version);
        }
    }
    Ok(())
}
