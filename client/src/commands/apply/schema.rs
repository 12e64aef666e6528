//! The fields of the objects in a file. They have the names of the API, which checks their values.

use std::fmt;

use muster_types::artifact::ArtifactType;
use muster_types::instance::{ConfigDriveType, FencingPolicy, RestartPolicy, SideChannel};
use muster_types::quota::QuotaName;
use muster_types::shared_storage::StorageType;
use muster_types::spec::{DiskBus, DiskType, Vdi};
use serde_json::Value;

use super::yaml::{Content, Node};
use crate::similar_name::closest;

/// A type of objects, in the order in which they depend on each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Namespace,
    Issuer,
    Rule,
    Network,
    Artifact,
    Instance,
}

impl Kind {
    pub(super) const ALL: [Self; 6] =
        [Self::Namespace, Self::Issuer, Self::Rule, Self::Network, Self::Artifact, Self::Instance];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Issuer => "issuer",
            Self::Rule => "rule",
            Self::Network => "network",
            Self::Artifact => "artifact",
            Self::Instance => "instance",
        }
    }

    /// Returns whether objects of this type belong to a namespace.
    pub(super) fn has_namespace(self) -> bool {
        !matches!(self, Self::Namespace | Self::Issuer)
    }

    /// Returns the fields besides `kind`, `name` and `namespace`.
    pub(super) fn fields(self) -> &'static [FieldSpec] {
        match self {
            Self::Namespace => NAMESPACE,
            Self::Issuer => ISSUER,
            Self::Rule => RULE,
            Self::Network => NETWORK,
            Self::Artifact => ARTIFACT,
            Self::Instance => INSTANCE,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A field that an object may have.
#[derive(Debug)]
pub(super) struct FieldSpec {
    pub(super) name: &'static str,
    pub(super) field_type: FieldType,
    pub(super) is_required: bool,
}

#[derive(Debug)]
pub(super) enum FieldType {
    Text,
    Bool,
    Count,
    /// One of some words.
    Choice(fn() -> Vec<&'static str>),
    TextList,
    /// Words, each of them one of some.
    ChoiceList(fn() -> Vec<&'static str>),
    Object(&'static [FieldSpec]),
    ObjectList(&'static [FieldSpec]),
    /// Strings by name.
    TextMap,
    /// Numbers or null by name, which is one of some words.
    CountMap(fn() -> Vec<&'static str>),
    /// Strings or lists of strings by name.
    ClaimMap,
    /// Any values by name.
    AnyMap,
}

const fn optional(name: &'static str, field_type: FieldType) -> FieldSpec {
    FieldSpec { name, field_type, is_required: false }
}

const fn required(name: &'static str, field_type: FieldType) -> FieldSpec {
    FieldSpec { name, field_type, is_required: true }
}

macro_rules! words {
    ($type:ty) => {
        || <$type>::ALL.iter().map(|each| each.as_str()).collect()
    };
}

const NAMESPACE: &[FieldSpec] = &[
    optional("trust", FieldType::TextList),
    optional("quotas", FieldType::CountMap(words!(QuotaName))),
    optional("metadata", FieldType::AnyMap),
];

const ISSUER: &[FieldSpec] = &[
    required("issuer_url", FieldType::Text),
    required("jwks_uri", FieldType::Text),
    required("audience", FieldType::Text),
    optional("metadata", FieldType::AnyMap),
];

const RULE: &[FieldSpec] = &[
    required("issuer", FieldType::Text),
    required("bound_claims", FieldType::ClaimMap),
    required("scopes", FieldType::TextList),
    required("key_ttl", FieldType::Count),
    required("key_name_prefix", FieldType::Text),
    optional("metadata", FieldType::AnyMap),
];

const NETWORK: &[FieldSpec] = &[
    required("netblock", FieldType::Text),
    optional("provide_dhcp", FieldType::Bool),
    optional("provide_nat", FieldType::Bool),
    optional("provide_dns", FieldType::Bool),
    optional("dns", FieldType::TextMap),
    optional("reserved", FieldType::TextMap),
    optional("routed_addresses", FieldType::Count),
    optional("metadata", FieldType::AnyMap),
];

const ARTIFACT: &[FieldSpec] = &[
    optional("url", FieldType::Text),
    optional("file", FieldType::Text),
    optional("artifact_type", FieldType::Choice(upload_types)),
    optional("shared", FieldType::Bool),
    optional("max_versions", FieldType::Count),
    optional("metadata", FieldType::AnyMap),
];

const INSTANCE: &[FieldSpec] = &[
    required("cpus", FieldType::Count),
    required("memory", FieldType::Count),
    required("disk", FieldType::ObjectList(DISK)),
    optional("network", FieldType::ObjectList(INTERFACE)),
    optional("ssh_key", FieldType::Text),
    optional("user_data", FieldType::Text),
    optional("placed_on", FieldType::Text),
    optional("video", FieldType::Object(VIDEO)),
    optional("uefi", FieldType::Bool),
    optional("secure_boot", FieldType::Bool),
    optional("nvram_template", FieldType::Text),
    optional("configdrive", FieldType::Choice(words!(ConfigDriveType))),
    optional("side_channels", FieldType::ChoiceList(words!(SideChannel))),
    optional("disposable", FieldType::Bool),
    optional("storage", FieldType::Choice(words!(StorageType))),
    optional("replicas", FieldType::Count),
    optional("restart", FieldType::Choice(words!(RestartPolicy))),
    optional("fencing", FieldType::Choice(words!(FencingPolicy))),
    optional("metadata", FieldType::AnyMap),
];

const DISK: &[FieldSpec] = &[
    optional("size", FieldType::Count),
    optional("base", FieldType::Text),
    optional("bus", FieldType::Choice(words!(DiskBus))),
    optional("type", FieldType::Choice(words!(DiskType))),
];

const INTERFACE: &[FieldSpec] = &[
    required("network_uuid", FieldType::Text),
    optional("address", FieldType::Text),
    optional("macaddress", FieldType::Text),
    optional("model", FieldType::Text),
    optional("float", FieldType::Bool),
];

const VIDEO: &[FieldSpec] = &[
    required("model", FieldType::Text),
    required("memory", FieldType::Count),
    optional("vdi", FieldType::Choice(words!(Vdi))),
];

fn upload_types() -> Vec<&'static str> {
    vec![ArtifactType::Image.as_str(), ArtifactType::Other.as_str()]
}

/// An error of a file: its line and its text.
pub(super) type LineError = (usize, String);

/// Checks the value of a field.
pub(super) fn check(spec: &FieldSpec, value: &Node, path: &str, errors: &mut Vec<LineError>) {
    let mut expect = |expected: &str| {
        errors.push((value.line, format!("{path} must be {expected}, not {}", value.describe())));
    };
    match (&spec.field_type, &value.content) {
        (FieldType::Text, Content::Scalar(Value::String(_)))
        | (FieldType::Bool, Content::Scalar(Value::Bool(_)))
        | (FieldType::AnyMap, Content::Object(_)) => {}
        (FieldType::Count, Content::Scalar(Value::Number(number))) if number.is_u64() => {}
        (FieldType::Text, _) => expect("a string, in quotes if it looks like a number or a boolean"),
        (FieldType::Bool, _) => expect("true or false"),
        (FieldType::Count, _) => expect("a number that is not negative"),
        (FieldType::AnyMap, _) => expect("an object"),
        (FieldType::Choice(words), _) => check_choice(&words(), value, path, errors),
        (FieldType::TextList, Content::List(items)) => {
            for item in items {
                check(&required("", FieldType::Text), item, path, errors);
            }
        }
        (FieldType::ChoiceList(words), Content::List(items)) => {
            for item in items {
                check_choice(&words(), item, path, errors);
            }
        }
        (FieldType::TextList | FieldType::ChoiceList(_) | FieldType::ObjectList(_), content)
            if !matches!(content, Content::List(_)) =>
        {
            expect("a list");
        }
        (FieldType::ObjectList(fields), Content::List(items)) => {
            for (at, item) in items.iter().enumerate() {
                check_object(fields, &[], item, &format!("{path}[{at}]"), errors);
            }
        }
        (FieldType::Object(fields), _) => check_object(fields, &[], value, path, errors),
        (FieldType::TextMap, Content::Object(fields)) => {
            for field in fields {
                let path = format!("{path}.{}", field.name);
                check(&required("", FieldType::Text), &field.value, &path, errors);
            }
        }
        (FieldType::CountMap(words), Content::Object(fields)) => {
            for field in fields {
                if !words().contains(&field.name.as_str()) {
                    errors.push((
                        field.line,
                        unknown(&format!("{path}.{}", field.name), &field.name, &words()),
                    ));
                } else if field.value.content != Content::Scalar(Value::Null) {
                    check(
                        &required("", FieldType::Count),
                        &field.value,
                        &format!("{path}.{}", field.name),
                        errors,
                    );
                }
            }
        }
        (FieldType::ClaimMap, Content::Object(fields)) => {
            for field in fields {
                let path = format!("{path}.{}", field.name);
                let is_list = matches!(field.value.content, Content::List(_));
                let field_type = if is_list { FieldType::TextList } else { FieldType::Text };
                check(&required("", field_type), &field.value, &path, errors);
            }
        }
        (_, _) => expect("an object"),
    }
}

fn check_choice(words: &[&str], value: &Node, path: &str, errors: &mut Vec<LineError>) {
    let is_known =
        matches!(&value.content, Content::Scalar(Value::String(word)) if words.contains(&word.as_str()));
    if !is_known {
        let text = format!("{path} must be one of {}, not {}", words.join(", "), value.to_json());
        errors.push((value.line, text));
    }
}

/// Checks an object: its fields are known, and none is missing. `common` are further names that were checked already.
pub(super) fn check_object(
    specs: &[FieldSpec],
    common: &[&str],
    node: &Node,
    path: &str,
    errors: &mut Vec<LineError>,
) {
    let Content::Object(fields) = &node.content else {
        errors.push((node.line, format!("{path} must be an object, not {}", node.describe())));
        return;
    };
    // The fields of an object itself need no path.
    let inner = |name: &str| if common.is_empty() { format!("{path}.{name}") } else { name.to_owned() };
    for field in fields.iter().filter(|field| !common.contains(&field.name.as_str())) {
        match specs.iter().find(|spec| spec.name == field.name) {
            Some(spec) => check(spec, &field.value, &inner(spec.name), errors),
            None => {
                let names: Vec<&str> =
                    common.iter().copied().chain(specs.iter().map(|spec| spec.name)).collect();
                errors.push((
                    field.line,
                    unknown(&format!("field {}", inner(&field.name)), &field.name, &names),
                ));
            }
        }
    }
    for spec in specs.iter().filter(|spec| spec.is_required) {
        if !fields.iter().any(|field| field.name == spec.name) {
            errors.push((node.line, format!("{} is missing", inner(spec.name))));
        }
    }
}

/// Returns the message for an unknown name: a similar one, or all of them.
pub(super) fn unknown(what: &str, name: &str, known: &[&str]) -> String {
    let names: Vec<String> = known.iter().map(|name| (*name).to_owned()).collect();
    match closest(name, &names) {
        Some(similar) => format!("{what} is unknown; did you mean {similar}?"),
        None => format!("{what} is unknown; known are {}", known.join(", ")),
    }
}
