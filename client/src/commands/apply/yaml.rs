//! YAML documents with the lines of their values. Only what JSON can express is accepted, and anchors with aliases.

use std::collections::BTreeMap;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};

/// The maximum depth of nested lists and objects.
const MAX_DEPTH: usize = 32;
/// The maximum number of values of a file, so that aliases of aliases cannot exhaust the memory.
const MAX_VALUES: usize = 200_000;

/// A value and the line on which it starts.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) content: Content,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    /// Null, a boolean, a number or a string.
    Scalar(Value),
    List(Vec<Node>),
    Object(Vec<Field>),
}

/// A field of an object.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Field {
    pub(super) name: String,
    /// The line of the name.
    pub(super) line: usize,
    pub(super) value: Node,
}

/// Why a file cannot be read, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct YamlError {
    pub(super) line: usize,
    pub(super) text: String,
}

impl Node {
    /// Returns the value without lines.
    pub(super) fn to_json(&self) -> Value {
        match &self.content {
            Content::Scalar(value) => value.clone(),
            Content::List(items) => items.iter().map(Self::to_json).collect(),
            Content::Object(fields) => {
                let fields = fields.iter().map(|field| (field.name.clone(), field.value.to_json()));
                Value::Object(fields.collect::<Map<_, _>>())
            }
        }
    }

    /// Returns what the value is, for messages.
    pub(super) fn describe(&self) -> &'static str {
        match &self.content {
            Content::Scalar(Value::Null) => "null",
            Content::Scalar(Value::Bool(_)) => "a boolean",
            Content::Scalar(Value::Number(_)) => "a number",
            Content::Scalar(_) => "a string",
            Content::List(_) => "a list",
            Content::Object(_) => "an object",
        }
    }

    fn size(&self) -> usize {
        match &self.content {
            Content::Scalar(_) => 1,
            Content::List(items) => 1 + items.iter().map(Self::size).sum::<usize>(),
            Content::Object(fields) => 1 + fields.iter().map(|field| field.value.size()).sum::<usize>(),
        }
    }

    fn depth(&self) -> usize {
        let inner = match &self.content {
            Content::Scalar(_) => None,
            Content::List(items) => items.iter().map(Self::depth).max(),
            Content::Object(fields) => fields.iter().map(|field| field.value.depth()).max(),
        };
        inner.map_or(0, |depth| depth + 1)
    }
}

/// A list or an object whose end has not been read.
struct Open {
    node: Node,
    anchor: usize,
    /// The field of an object whose value follows.
    name: Option<(String, usize)>,
}

/// Parses the documents of a file. Empty documents are omitted.
pub(super) fn parse(text: &str) -> Result<Vec<Node>, YamlError> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event
            .map_err(|error| YamlError { line: error.marker().line(), text: error.info().to_owned() })?;
        builder.add(event, span.start.line())?;
    }
    Ok(builder.documents)
}

#[derive(Default)]
struct Builder {
    documents: Vec<Node>,
    open: Vec<Open>,
    anchors: BTreeMap<usize, Node>,
    values: usize,
}

impl Builder {
    fn add(&mut self, event: Event<'_>, line: usize) -> Result<(), YamlError> {
        let fail = |text: &str| Err(YamlError { line, text: text.to_owned() });
        match event {
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => return fail("tags are not supported"),
            Event::Scalar(text, style, anchor, None) => {
                let is_plain = style == ScalarStyle::Plain;
                let value = if is_plain { plain_value(&text) } else { Value::from(text.as_ref()) };
                return self.complete(Node { line, content: Content::Scalar(value) }, anchor);
            }
            Event::SequenceStart(anchor, None) => self.start(Content::List(vec![]), anchor, line)?,
            Event::MappingStart(anchor, None) => self.start(Content::Object(vec![]), anchor, line)?,
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(Open { node, anchor, .. }) = self.open.pop() {
                    return self.complete(node, anchor);
                }
            }
            Event::Alias(anchor) => {
                let Some(node) = self.anchors.get(&anchor).cloned() else {
                    return fail("the alias refers to a value that contains it");
                };
                self.values += node.size();
                if self.open.len() + node.depth() > MAX_DEPTH {
                    return fail("too deeply nested");
                }
                return self.complete(node, 0);
            }
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn start(&mut self, content: Content, anchor: usize, line: usize) -> Result<(), YamlError> {
        if self.open.len() >= MAX_DEPTH {
            return Err(YamlError { line, text: "too deeply nested".to_owned() });
        }
        self.open.push(Open { node: Node { line, content }, anchor, name: None });
        Ok(())
    }

    /// Adds a complete value to the list or object that contains it.
    fn complete(&mut self, node: Node, anchor: usize) -> Result<(), YamlError> {
        let line = node.line;
        let fail = |text: String| Err(YamlError { line, text });
        self.values += 1;
        if self.values > MAX_VALUES {
            return fail(format!("the file has more than {MAX_VALUES} values"));
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        let Some(open) = self.open.last_mut() else {
            if node.content != Content::Scalar(Value::Null) {
                self.documents.push(node);
            }
            return Ok(());
        };
        match (&mut open.node.content, open.name.take()) {
            (Content::List(items), _) => items.push(node),
            (Content::Object(fields), Some((name, line))) => fields.push(Field { name, line, value: node }),
            (Content::Object(fields), None) => {
                let Content::Scalar(name) = &node.content else {
                    return fail("the name of a field must be a string".to_owned());
                };
                let name = name.as_str().map_or_else(|| name.to_string(), str::to_owned);
                if fields.iter().any(|field| field.name == name) {
                    return fail(format!("field {name} is given twice"));
                }
                open.name = Some((name, line));
            }
            (Content::Scalar(_), _) => {}
        }
        Ok(())
    }
}

/// Returns what an unquoted word means in YAML 1.2.
fn plain_value(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return true.into(),
        "false" | "False" | "FALSE" => return false.into(),
        _ => {}
    }
    let prefixed = |prefix: &str, radix| {
        text.strip_prefix(prefix).and_then(|digits| u64::from_str_radix(digits, radix).ok())
    };
    if let Some(number) = prefixed("0x", 16).or_else(|| prefixed("0o", 8)) {
        return number.into();
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let starts_as_number = digits.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    if !starts_as_number || !digits.contains(|any: char| any.is_ascii_digit()) {
        return text.into();
    }
    let number = text.strip_prefix('+').unwrap_or(text);
    let integer =
        number.parse::<i64>().map(Number::from).or_else(|_| number.parse::<u64>().map(Number::from));
    match integer {
        Ok(number) => Value::Number(number),
        Err(_) => number.parse().ok().and_then(Number::from_f64).map_or_else(|| text.into(), Value::Number),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn documents(text: &str) -> Vec<Value> {
        parse(text).unwrap().iter().map(Node::to_json).collect()
    }

    #[test]
    fn reads_documents_lists_and_block_strings() {
        let text = "kind: network\nname: lan\n---\n- a: [1, two]\n- text: |\n    #cloud-config\n    x: y\n---\n# nothing\n";
        let expected = [
            json!({ "kind": "network", "name": "lan" }),
            json!([{ "a": [1, "two"] }, { "text": "#cloud-config\nx: y\n" }]),
        ];
        assert_eq!(documents(text), expected);
    }

    #[test]
    fn unquoted_words_have_the_types_of_yaml_1_2() {
        let text = "[1, -2, 1.5, 0x10, true, yes, null, ~, '7', \"true\", 10.0.0.0/24, 1.2.3.4, 5d5e, 1e3, 02:00:00, .]";
        let expected = json!([
            1,
            -2,
            1.5,
            16,
            true,
            "yes",
            null,
            null,
            "7",
            "true",
            "10.0.0.0/24",
            "1.2.3.4",
            "5d5e",
            1000.0,
            "02:00:00",
            "."
        ]);
        assert_eq!(documents(text), [expected]);
    }

    #[test]
    fn every_value_has_its_line() {
        let nodes = parse("---\na: 1\nb:\n  - c: 2\n").unwrap();
        let Content::Object(fields) = &nodes[0].content else { panic!("{nodes:?}") };
        assert_eq!((fields[0].line, fields[1].line), (2, 3));
        let Content::List(items) = &fields[1].value.content else { panic!("{nodes:?}") };
        assert_eq!(items[0].line, 4);
    }

    #[test]
    fn errors_name_their_line() {
        for (text, line, part) in [
            ("a: 1\na: 2\n", 2, "given twice"),
            ("a: 1\nb: !x 2\n", 2, "tags"),
            ("a: 1\nb: [1\n", 3, ""),
            ("a: 1\nb: *c\n", 2, ""),
            ("a: 1\n? [x]\n: 1\n", 2, "name of a field"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.line == line && error.text.contains(part), "{text:?}: {error:?}");
        }
    }

    #[test]
    fn aliases_repeat_values_within_limits() {
        assert_eq!(documents("a: &x {b: 1}\nc: *x\n"), [json!({ "a": { "b": 1 }, "c": { "b": 1 } })]);
        let mut bomb = "a0: &a0 [1, 1]\n".to_owned();
        for level in 1..30 {
            let below = level - 1;
            bomb += &format!("a{level}: &a{level} [*a{below}, *a{below}, *a{below}]\n");
        }
        assert!(parse(&bomb).unwrap_err().text.contains("more than"));
        assert!(parse(&"[".repeat(100)).unwrap_err().text.contains("nested"));
    }
}
