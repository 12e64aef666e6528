//! Standard output.

use std::io::{ErrorKind, Write as _};

/// Writes to standard output. A closed pipe is not an error.
pub(crate) fn print(text: &[u8]) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
