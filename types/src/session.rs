//! Browser sessions, and the one-time tickets with which they and consoles are opened. See docs/decisions/0080.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::object::string_enum;

string_enum! {
    /// What a ticket is exchanged for.
    TicketPurpose { Login = "login", Console = "console" }
}

string_enum! {
    /// A console of an instance.
    ConsoleKind {
        /// The display of an instance with VNC.
        Vnc = "vnc",
        /// The display of an instance with SPICE.
        Spice = "spice",
        /// The serial console.
        Serial = "serial",
        /// A command that the agent runs with a terminal in the guest.
        Terminal = "terminal",
    }
}

/// A ticket for a browser session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LoginTicketRecord {
    /// The ticket, for `POST /auth/session`. It can be used once.
    pub ticket: String,
    /// Unix time after which the ticket is invalid.
    pub expires: f64,
}

/// The credentials of a request, and how long they are valid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionRecord {
    /// The namespace of the caller.
    pub namespace: String,
    /// The name of the key that the caller has logged in with.
    pub key_name: String,
    /// The scopes that the caller is limited to; `null` if it is unrestricted.
    pub scopes: Option<Vec<String>>,
    /// Unix time at which the session or the token expires.
    pub expires: f64,
}

/// A ticket for the connection to a console.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleTicketRecord {
    /// The ticket, for the header `Sec-WebSocket-Protocol: binary, muster-ticket.TICKET`. It can be used once.
    pub ticket: String,
    /// Unix time after which the ticket is invalid.
    pub expires: f64,
    /// The path of the WebSocket.
    pub path: String,
    /// The password of the display; `null` for other consoles. It changes whenever the instance is powered on.
    pub password: Option<String>,
}
