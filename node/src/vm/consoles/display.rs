//! The display of a VM: connections to it, and its password.

use std::os::fd::AsFd;

use muster_types::key::Secret;
use muster_types::spec::Vdi;
use muster_types::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::UnixStream;
use uuid::Uuid;

use crate::vm::qmp::Qmp;

/// The protocol of a display.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::vm) enum DisplayProtocol {
    Vnc,
    Spice,
}

impl DisplayProtocol {
    pub(in crate::vm) fn of(vdi: Vdi) -> Self {
        match vdi {
            Vdi::Vnc => Self::Vnc,
            Vdi::Spice | Vdi::SpiceConcurrent | Vdi::SpiceDebug => Self::Spice,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Vnc => "vnc",
            Self::Spice => "spice",
        }
    }

    /// Generates a password.
    pub(in crate::vm) fn generate_password(self) -> Secret {
        match self {
            // VNC uses the first eight characters only: base64 has more bits in them than hexadecimal digits.
            Self::Vnc => Secret::new(base64_text(&Uuid::new_v4())),
            Self::Spice => Secret::new(Uuid::new_v4().simple().to_string()),
        }
    }

    /// Sets the password of the display, without which it refuses every connection.
    pub(in crate::vm) async fn set_password(self, qmp: &Qmp, password: &Secret) -> Result<()> {
        let arguments = json!({ "protocol": self.as_str(), "password": password.expose() });
        qmp.execute("set_password", arguments).await.map(drop)
    }

    /// Opens a connection to the display, which requires the password.
    pub(super) async fn connect(self, qmp: &Qmp, tls: bool) -> Result<UnixStream> {
        let failed =
            |error: std::io::Error| Error::Unavailable(format!("failed to create a socket pair: {error}"));
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let name = format!("display-{}", Uuid::new_v4().simple());
        qmp.send_fd(&name, theirs.as_fd()).await?;
        let mut arguments = json!({ "protocol": self.as_str(), "fdname": name, "skipauth": false });
        if self == Self::Spice {
            arguments["tls"] = tls.into();
        }
        if let Err(error) = qmp.execute("add_client", arguments).await {
            let _ = qmp.execute("closefd", json!({ "fdname": name })).await;
            return Err(error);
        }
        Ok(ours)
    }
}

/// Encodes six random bytes of a UUID in eight characters that need no quoting.
fn base64_text(random: &Uuid) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(&random.as_bytes()[..6])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn passwords_are_random_and_fit_the_protocol() {
        for (protocol, length) in [(DisplayProtocol::Vnc, 8), (DisplayProtocol::Spice, 32)] {
            let all: BTreeSet<String> =
                (0..50).map(|_| protocol.generate_password().expose().to_owned()).collect();
            assert_eq!(all.len(), 50);
            assert!(all.iter().all(|password| password.len() == length), "{all:?}");
        }
    }
}
