//! YAML output. Every JSON text is valid YAML, so strings that a YAML parser could read as something else are written as
//! in JSON. See docs/decisions/0091.

use serde_json::Value;

/// Formats a value as a YAML document in block style.
pub(super) fn render(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(fields) if !fields.is_empty() => write_block(&mut out, value, 0),
        Value::Array(items) if !items.is_empty() => write_block(&mut out, value, 0),
        scalar => {
            out.push_str(&inline(scalar));
            out.push('\n');
        }
    }
    out
}

/// Writes the lines of a list or an object that is not empty.
fn write_block(out: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                out.push_str(&" ".repeat(indent));
                out.push_str(&string(name));
                out.push(':');
                write_after_key(out, value, indent);
            }
        }
        Value::Array(items) => {
            for item in items {
                out.push_str(&" ".repeat(indent));
                out.push('-');
                if is_block(item) {
                    let mut block = String::new();
                    write_block(&mut block, item, indent + 2);
                    // The first line continues the line of the dash.
                    out.push(' ');
                    out.push_str(&block[indent + 2..]);
                } else {
                    out.push(' ');
                    out.push_str(&inline(item));
                    out.push('\n');
                }
            }
        }
        _ => {}
    }
}

fn write_after_key(out: &mut String, value: &Value, indent: usize) {
    if is_block(value) {
        out.push('\n');
        write_block(out, value, indent + 2);
    } else {
        out.push(' ');
        out.push_str(&inline(value));
        out.push('\n');
    }
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(fields) => !fields.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    }
}

/// Formats a scalar or an empty collection.
fn inline(value: &Value) -> String {
    match value {
        Value::String(text) => string(text),
        other => other.to_string(),
    }
}

/// Formats a string, in quotes unless every YAML parser reads it as this string.
fn string(text: &str) -> String {
    if is_plain(text) { text.to_owned() } else { Value::from(text).to_string() }
}

fn is_plain(text: &str) -> bool {
    let mut bytes = text.bytes();
    let starts_as_word = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'/');
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./ @+".contains(&byte);
    // YAML 1.1 reads these as booleans or null.
    let reserved = ["true", "false", "yes", "no", "on", "off", "null", "y", "n"];
    starts_as_word
        && bytes.all(is_safe)
        && !text.ends_with(' ')
        && !reserved.contains(&text.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn writes_nested_lists_and_objects() {
        let value = json!({
            "name": "web", "disks": [{ "size": 8, "base": null }, [1, 2]], "empty": {}, "none": [],
            "nested": { "deep": { "x": true } }
        });
        let expected = "\
disks:
  - base: null
    size: 8
  - - 1
    - 2
empty: {}
name: web
nested:
  deep:
    x: true
none: []
";
        assert_eq!(render(&value), expected);
        assert_eq!(render(&json!([])), "[]\n");
        assert_eq!(render(&json!("a")), "a\n");
    }

    #[test]
    fn quotes_strings_that_could_be_something_else() {
        for text in [
            "", "yes", "NULL", "7", "1.5", "-", "a: b", "# x", " a", "a ", "0x7", "a\nb", "~", "10:20", "é",
            "*a", "a #b",
        ] {
            assert_eq!(string(text), Value::from(text).to_string(), "{text:?}");
        }
        for text in ["web", "a b", "/dev/vda", "5d5e".trim_start_matches('5'), "label-tiny_1.qcow2"] {
            assert_eq!(string(text), text);
        }
    }
}
