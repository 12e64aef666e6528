//! File modes as callers of the API write them.

use muster_agent::mode::{FileMode, Radix};
use muster_types::agent_operation::ChmodMode;
use muster_types::{Error, Result};
use serde_json::Value;

/// The maximum length of a symbolic mode.
const MAX_SYMBOLIC_MODE_BYTES: usize = 255;

/// Parses a mode: a number, also as decimal digits and with the bits of the file type, or a symbolic mode such as
/// `ugo+r`.
pub fn parse(value: &Value) -> Result<ChmodMode> {
    let mode = match value {
        Value::Number(number) => number.as_u64().and_then(numeric_mode),
        Value::String(text) => match FileMode::parse(text, Radix::Decimal) {
            Some(FileMode::Number(number)) => numeric_mode(number.into()),
            Some(FileMode::Symbolic(_)) if text.len() <= MAX_SYMBOLIC_MODE_BYTES => {
                Some(ChmodMode::Symbolic(text.clone()))
            }
            _ => None,
        },
        _ => None,
    };
    let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    mode.ok_or_else(|| Error::NotReady(format!("invalid mode: {shown}")))
}

/// Accepts the 16 bits of a file's type and permissions.
fn numeric_mode(number: u64) -> Option<ChmodMode> {
    u16::try_from(number).ok().map(|bits| ChmodMode::Number(bits.into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn accepts_decimal_numbers_with_file_type_bits() {
        for value in [json!(33188), json!("33188")] {
            assert_eq!(parse(&value).unwrap(), ChmodMode::Number(33188));
        }
        assert_eq!(parse(&json!("0420")).unwrap(), ChmodMode::Number(420), "a leading zero is not octal");
        assert_eq!(parse(&json!(0)).unwrap(), ChmodMode::Number(0));
    }

    #[test]
    fn accepts_symbolic_modes_of_chmod() {
        for words in ["ugo+r", "u=rw,go=r", "+x", "-x", "a=", "u+s,+t", "g=u", "u+r-w", "a+rX"] {
            assert_eq!(parse(&json!(words)).unwrap(), ChmodMode::Symbolic(words.into()));
        }
    }

    #[test]
    fn rejects_invalid_modes() {
        for value in [
            json!("rwxr-xr-x"),
            json!(""),
            json!("u"),
            json!("u+r,"),
            json!("u+r; reboot"),
            json!("0o644"),
            json!("+gu"),
            json!(65536),
            json!(-1),
            json!(4.2),
            json!(true),
            json!(null),
            json!([420]),
        ] {
            let result = parse(&value);
            assert!(
                matches!(&result, Err(Error::NotReady(text)) if text.starts_with("invalid mode: ")),
                "{value}"
            );
        }
    }
}
