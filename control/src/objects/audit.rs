//! Adds the caller to audit events.

use muster_types::event::Event;

use crate::auth::Caller;

/// Adds the namespace and the key of the caller to an event.
pub(crate) fn with_caller(caller: &Caller, event: Event) -> Event {
    event.with("caller", caller.namespace.clone()).with("keyname", caller.key_name.clone())
}

/// Adds the key, the request line and the address of the caller to an event.
pub fn with_request(caller: &Caller, event: Event) -> Event {
    event
        .with("keyname", caller.key_name.clone())
        .with("method", caller.method.clone())
        .with("path", caller.path.clone())
        .with("remote-address", caller.remote.clone())
}
