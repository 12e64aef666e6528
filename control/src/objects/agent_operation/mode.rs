//! Permissions of files as callers write them.

use muster_types::agent_operation::Mode;
use muster_types::{Error, Result};
use serde_json::Value;

/// Reads a mode: a number, which may also be decimal digits and have the bits of a file's type, or words such as
/// `ugo+r`.
pub fn read(value: &Value) -> Result<Mode> {
    let found = match value {
        Value::Number(number) => number.as_u64().and_then(number_mode),
        Value::String(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
            text.parse().ok().and_then(number_mode)
        }
        Value::String(text) if text.len() <= 255 && text.split(',').all(is_clause) => {
            Some(Mode::Words(text.clone()))
        }
        _ => None,
    };
    let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    found.ok_or_else(|| Error::NotReady(format!("invalid mode: {shown}")))
}

/// Type and permissions of a file are 16 bits.
fn number_mode(number: u64) -> Option<Mode> {
    u16::try_from(number).ok().map(|bits| Mode::Number(bits.into()))
}

/// Whether a text is one clause of words: who, then one or several of an operator and permissions.
fn is_clause(text: &str) -> bool {
    let is_operator = |c: char| matches!(c, '+' | '-' | '=');
    let rest = text.trim_start_matches(['u', 'g', 'o', 'a']);
    let mut parts = rest.split(is_operator);
    // Nothing is between who and the first operator.
    parts.next() == Some("")
        && rest.contains(is_operator)
        && parts.all(|what| {
            matches!(what, "u" | "g" | "o")
                || what.chars().all(|c| matches!(c, 'r' | 'w' | 'x' | 'X' | 's' | 't'))
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_decimal_and_may_have_the_type_of_a_file() {
        for value in [json!(33188), json!("33188")] {
            assert_eq!(read(&value).unwrap(), Mode::Number(33188));
        }
        assert_eq!(read(&json!("0420")).unwrap(), Mode::Number(420), "a leading zero is not octal");
        assert_eq!(read(&json!(0)).unwrap(), Mode::Number(0));
    }

    #[test]
    fn words_are_those_of_chmod() {
        for words in ["ugo+r", "u=rw,go=r", "+x", "-x", "a=", "u+s,+t", "g=u", "u+r-w", "a+rX"] {
            assert_eq!(read(&json!(words)).unwrap(), Mode::Words(words.into()));
        }
    }

    #[test]
    fn anything_else_is_refused() {
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
            let refused = read(&value);
            assert!(
                matches!(&refused, Err(Error::NotReady(text)) if text.starts_with("invalid mode: ")),
                "{value}"
            );
        }
    }
}
