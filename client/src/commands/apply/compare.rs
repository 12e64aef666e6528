//! The differences between an object of a file and the one of the cluster, and the requests that remove them. Only fields
//! that the file contains are compared.

use std::collections::BTreeSet;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use muster_types::address::AddressType;
use muster_types::instance::{FencingPolicy, RestartPolicy};
use muster_types::quota::QuotaName;
use serde_json::{Map, Value, json};

use super::manifest::Declared;
use super::observed::{Cluster, Condition, Observed};
use super::schema::Kind;
use crate::api::{Client, ListQuery};
use crate::transfer::LocalFile;

/// A field that differs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Difference {
    pub(super) field: String,
    pub(super) from: Value,
    pub(super) to: Value,
    /// The requests that change it; `None` if it cannot be changed.
    pub(super) edits: Option<Vec<Edit>>,
}

impl Difference {
    fn fixed(field: impl Into<String>, from: &Value, to: &Value) -> Self {
        Self { field: field.into(), from: from.clone(), to: to.clone(), edits: None }
    }

    fn editable(field: impl Into<String>, from: Value, to: Value, edits: Vec<Edit>) -> Self {
        Self { field: field.into(), from, to, edits: Some(edits) }
    }
}

/// A request that changes an object.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Edit {
    SetMetadata(String, Value),
    DeleteMetadata(String),
    SetQuota(QuotaName, u64),
    ResetQuota(QuotaName),
    AddTrust(String),
    RemoveTrust(String),
    /// Replaces all terms of an issuer or a rule.
    PutTerms,
    SetName(String, String),
    DeleteName(String),
    Reserve(String, String),
    Release(String),
    Route,
    Unroute(String),
    Share(bool),
    SetMaxVersions(u32),
    /// Uploads or fetches the content of an artifact.
    Transfer,
    SetFencing(Option<FencingPolicy>, Option<RestartPolicy>),
    /// Gives an interface a floating address, or removes it.
    Float(String, bool),
    /// Adds an interface.
    Plug(Value),
}

/// Returns the differences of an object.
pub(super) async fn differences(
    client: &Client,
    cluster: &Cluster,
    declared: &Declared,
    observed: &Observed,
) -> anyhow::Result<Vec<Difference>> {
    let mut found = match declared.identity.kind {
        Kind::Namespace => namespace(client, declared, observed).await?,
        Kind::Issuer | Kind::Rule => terms(declared, observed),
        Kind::Network => network(client, declared, observed).await?,
        Kind::Artifact => artifact(client, declared, observed).await?,
        Kind::Instance => instance(cluster, declared, observed),
    };
    let current = |key: &str| observed.record["metadata"].get(key).cloned();
    found.extend(entries("metadata", declared, observed, current, |key, value| {
        Some(match value {
            Some(value) => vec![Edit::SetMetadata(key.to_owned(), value.clone())],
            None => vec![Edit::DeleteMetadata(key.to_owned())],
        })
    }));
    Ok(found)
}

/// Compares a field with entries. Entries that apply has set and that were removed from the file are removed from the object.
fn entries(
    field: &str,
    declared: &Declared,
    observed: &Observed,
    current: impl Fn(&str) -> Option<Value>,
    edits: impl Fn(&str, Option<&Value>) -> Option<Vec<Edit>>,
) -> Vec<Difference> {
    let mut wanted: Map<String, Value> = declared.entries(field);
    for key in observed.mark.iter().flat_map(|mark| mark.entries_of(field).into_iter().map(|(key, _)| key)) {
        wanted.entry(key).or_insert(Value::Null);
    }
    let mut found = vec![];
    for (key, to) in wanted {
        let from = current(&key).unwrap_or_default();
        if from != to {
            let edits = edits(&key, Some(&to).filter(|to| !to.is_null()));
            found.push(Difference { field: format!("{field}.{key}"), from, to, edits });
        }
    }
    found
}

/// Returns whether a field with entries is in the file, or was when it was applied before.
fn has_entries(field: &str, declared: &Declared, observed: &Observed) -> bool {
    let applied = observed.mark.as_ref().is_some_and(|mark| !mark.entries_of(field).is_empty());
    applied || declared.fields.contains_key(field)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

async fn namespace(
    client: &Client,
    declared: &Declared,
    observed: &Observed,
) -> anyhow::Result<Vec<Difference>> {
    let trusted = observed.record["trust"]["full"].as_array().cloned().unwrap_or_default();
    let current = |key: &str| trusted.iter().any(|name| name == key).then_some(Value::Bool(true));
    let mut found = entries("trust", declared, observed, current, |key, value| {
        let edit = if value.is_some() { Edit::AddTrust } else { Edit::RemoveTrust };
        Some(vec![edit(key.to_owned())])
    });
    if has_entries("quotas", declared, observed) {
        let quotas = client.quotas(&observed.id, &ListQuery::default()).await?.value()?;
        let current = |key: &str| {
            let quota = quotas.iter().find(|quota| quota.name.as_str() == key && !quota.is_default)?;
            Some(json!(quota.limit.unwrap_or(0)))
        };
        found.extend(entries("quotas", declared, observed, current, |key, value| {
            let name = key.parse().ok()?;
            Some(vec![match value.and_then(Value::as_u64) {
                Some(limit) => Edit::SetQuota(name, limit),
                None => Edit::ResetQuota(name),
            }])
        }));
    }
    Ok(found)
}

/// Compares an issuer or a rule, whose terms are replaced as a whole.
fn terms(declared: &Declared, observed: &Observed) -> Vec<Difference> {
    let fields = declared.fields.iter().filter(|(name, _)| *name != "metadata");
    let differing = fields.filter(|(name, value)| {
        let current = &observed.record[name.as_str()];
        if *name == "scopes" { as_set(current) != as_set(value) } else { current != *value }
    });
    differing
        .map(|(name, value)| {
            let current = observed.record[name.as_str()].clone();
            Difference::editable(name, current, value.clone(), vec![Edit::PutTerms])
        })
        .collect()
}

/// Returns the words of a list whose order does not matter.
fn as_set(value: &Value) -> BTreeSet<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

async fn network(
    client: &Client,
    declared: &Declared,
    observed: &Observed,
) -> anyhow::Result<Vec<Difference>> {
    let mut found = fixed(&["netblock", "provide_dhcp", "provide_nat", "provide_dns"], declared, observed);
    let named = observed.mark.as_ref().map(|mark| mark.entries_of("dns")).unwrap_or_default();
    found.extend(entries(
        "dns",
        declared,
        observed,
        |key| named.get(key).cloned(),
        |key, value| {
            Some(match value {
                Some(value) => vec![Edit::SetName(key.to_owned(), text(value))],
                None => vec![Edit::DeleteName(key.to_owned())],
            })
        },
    ));
    if has_entries("reserved", declared, observed) {
        let addresses = client.network_addresses(&observed.id, &ListQuery::default()).await?.value()?;
        let used = |key: &str| addresses.iter().find(|address| address.address.to_string() == key);
        let current = |key: &str| {
            let address = used(key).filter(|address| address.kind == AddressType::Manual)?;
            Some(json!(address.comment))
        };
        found.extend(entries("reserved", declared, observed, current, |key, value| {
            let release = current(key).map(|_| Edit::Release(key.to_owned()));
            let reserve = value.map(|comment| Edit::Reserve(key.to_owned(), text(comment)));
            Some(release.into_iter().chain(reserve).collect())
        }));
    }
    if let Some(wanted) = declared.fields.get("routed_addresses").and_then(Value::as_u64) {
        let references = observed.record["references_from"]["routed_address"].as_array();
        let routed: Vec<String> = references
            .into_iter()
            .flatten()
            .map(|reference| text(&reference["relationship_value"]))
            .collect();
        let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
        let added = wanted.saturating_sub(routed.len());
        let removed = routed.iter().skip(wanted).map(|address| Edit::Unroute(address.clone()));
        let edits: Vec<Edit> = std::iter::repeat_n(Edit::Route, added).chain(removed).collect();
        if !edits.is_empty() {
            found.push(Difference::editable("routed_addresses", json!(routed.len()), json!(wanted), edits));
        }
    }
    Ok(found)
}

/// Compares fields that cannot be changed and that the record has with the same name.
fn fixed(names: &[&str], declared: &Declared, observed: &Observed) -> Vec<Difference> {
    let differing = names.iter().filter_map(|name| {
        let (wanted, current) = (declared.fields.get(*name)?, &observed.record[*name]);
        (wanted != current).then(|| Difference::fixed(*name, current, wanted))
    });
    differing.collect()
}

async fn artifact(
    client: &Client,
    declared: &Declared,
    observed: &Observed,
) -> anyhow::Result<Vec<Difference>> {
    let mut found = vec![];
    let (record, fields) = (&observed.record, &declared.fields);
    if let Some(path) = local_file(declared) {
        let wanted = LocalFile::open(&path)?.sha512().await?;
        let versions = client.versions(observed.id.as_str().into(), &ListQuery::default()).await?.value()?;
        let current = versions.last().and_then(|version| version.blob.sha512.clone());
        if !current.as_ref().is_some_and(|current| current.eq_ignore_ascii_case(&wanted)) {
            let (current, wanted) = (current.map(abbreviated), abbreviated(wanted));
            found.push(Difference::editable("sha512", json!(current), json!(wanted), vec![Edit::Transfer]));
        }
    }
    if let Condition::Failed(reason) = &observed.condition
        && found.is_empty()
    {
        found.push(Difference::editable("state", json!(reason), json!("created"), vec![Edit::Transfer]));
    }
    if let Some(shared) = fields.get("shared").and_then(Value::as_bool)
        && record["shared"] != shared
    {
        let edits = vec![Edit::Share(shared)];
        found.push(Difference::editable("shared", record["shared"].clone(), shared.into(), edits));
    }
    if let Some(count) = fields.get("max_versions").filter(|count| record["max_versions"] != **count) {
        let edit =
            Edit::SetMaxVersions(u32::try_from(count.as_u64().unwrap_or_default()).unwrap_or(u32::MAX));
        let current = record["max_versions"].clone();
        found.push(Difference::editable("max_versions", current, count.clone(), vec![edit]));
    }
    Ok(found)
}

/// Returns the file that an artifact is uploaded from.
pub(super) fn local_file(declared: &Declared) -> Option<PathBuf> {
    declared.fields.get("file").and_then(Value::as_str).map(|file| declared.directory.join(file))
}

fn abbreviated(mut checksum: String) -> String {
    checksum.truncate(12);
    checksum
}

fn instance(cluster: &Cluster, declared: &Declared, observed: &Observed) -> Vec<Difference> {
    const FIXED: [&str; 9] = [
        "cpus",
        "memory",
        "uefi",
        "secure_boot",
        "nvram_template",
        "configdrive",
        "disposable",
        "storage",
        "replicas",
    ];
    let (record, fields) = (&observed.record, &declared.fields);
    let mut found = fixed(&FIXED, declared, observed);
    if let Some(key) = fields.get("ssh_key").and_then(Value::as_str)
        && record["ssh_key"] != key.trim()
    {
        found.push(Difference::fixed("ssh_key", &record["ssh_key"], &key.trim().into()));
    }
    if let Some(data) = fields.get("user_data").and_then(Value::as_str)
        && record["user_data"] != encode_user_data(data)
    {
        // It may contain secrets.
        let current = record["user_data"].as_str().and_then(|text| STANDARD.decode(text).ok());
        let size = |bytes: usize| json!(format!("{bytes} bytes"));
        let from = current.map_or(Value::Null, |bytes| size(bytes.len()));
        found.push(Difference::fixed("user_data", &from, &size(data.len())));
    }
    if let Some(node) = fields
        .get("placed_on")
        .filter(|node| **node != record["requested_placement"] && **node != record["node"])
    {
        found.push(Difference::fixed("placed_on", &record["node"], node));
    }
    if let Some(channels) = fields.get("side_channels")
        && as_set(channels) != as_set(&record["side_channels"])
    {
        found.push(Difference::fixed("side_channels", &record["side_channels"], channels));
    }
    for (name, value) in fields.get("video").and_then(Value::as_object).into_iter().flatten() {
        let current = &record["video"][name];
        if current != value {
            found.push(Difference::fixed(format!("video.{name}"), current, value));
        }
    }
    found.extend(fencing(declared, observed));
    found.extend(disks(cluster, declared, observed));
    found.extend(interfaces(cluster, declared, observed));
    found
}

/// Returns user data as the API expects it.
pub(super) fn encode_user_data(text: &str) -> String {
    STANDARD.encode(text)
}

/// Compares what happens when the host is lost. Both policies are replaced together.
fn fencing(declared: &Declared, observed: &Observed) -> Vec<Difference> {
    let names = ["fencing", "restart"];
    let wanted = |name: &str| declared.fields.get(name).unwrap_or(&observed.record[name]).clone();
    let edit = Edit::SetFencing(
        serde_json::from_value(wanted("fencing")).ok(),
        serde_json::from_value(wanted("restart")).ok(),
    );
    let differing = names.iter().filter(|name| wanted(name) != observed.record[**name]);
    differing
        .map(|name| {
            let current = observed.record[*name].clone();
            Difference::editable(*name, current, wanted(name), vec![edit.clone()])
        })
        .collect()
}

fn disks(cluster: &Cluster, declared: &Declared, observed: &Observed) -> Vec<Difference> {
    let wanted = declared.items("disk");
    let current = observed.record["disk_spec"].as_array().cloned().unwrap_or_default();
    if wanted.len() != current.len() {
        let count = |disks: usize| json!(format!("{disks} disks"));
        return vec![Difference::fixed("disk", &count(current.len()), &count(wanted.len()))];
    }
    let mut found = vec![];
    for (at, (wanted, current)) in wanted.iter().zip(&current).enumerate() {
        for (name, value) in wanted.as_object().into_iter().flatten() {
            let current = &current[name];
            let is_equal =
                if name == "base" { same_image(cluster, declared, value, current) } else { current == value };
            if !is_equal {
                found.push(Difference::fixed(format!("disk[{at}].{name}"), current, value));
            }
        }
    }
    found
}

/// Returns whether an instance has an image: a name is replaced by a reference when the instance is created.
fn same_image(cluster: &Cluster, declared: &Declared, wanted: &Value, current: &Value) -> bool {
    let name = wanted.as_str().unwrap_or_default();
    if wanted == current || name.eq_ignore_ascii_case("none") && current.is_null() {
        return true;
    }
    let Some(current) = current.as_str() else { return false };
    let namespace = declared.identity.namespace.as_deref();
    let mut artifacts = cluster.objects.iter().filter(|object| {
        object.identity.kind == Kind::Artifact && current == format!("sf://artifact/{}", object.id)
    });
    current == format!("label:{name}")
        || artifacts.any(|object| {
            let is_named = object.record["name"] == name || object.id == name;
            is_named && (object.identity.namespace.as_deref() == namespace || object.record["shared"] == true)
        })
}

fn interfaces(cluster: &Cluster, declared: &Declared, observed: &Observed) -> Vec<Difference> {
    let Some(wanted) = declared.fields.get("network").and_then(Value::as_array) else { return vec![] };
    let current = observed.record["interfaces"].as_array().cloned().unwrap_or_default();
    let mut found = vec![];
    for (at, interface) in wanted.iter().enumerate() {
        let field = |name: &str| format!("network[{at}].{name}");
        let Some(current) = current.get(at) else {
            let edits = vec![Edit::Plug(interface.clone())];
            let network = interface["network_uuid"].clone();
            found.push(Difference::editable(format!("network[{at}]"), Value::Null, network, edits));
            continue;
        };
        let network = text(&interface["network_uuid"]);
        let namespace = declared.identity.namespace.as_deref().unwrap_or_default();
        let id = cluster.id_of(Kind::Network, namespace, &network).unwrap_or(&network);
        if current["network_uuid"] != id {
            found.push(Difference::fixed(field("network_uuid"), &current["network_uuid"], &json!(network)));
        }
        if let Some(address) = interface.get("address").and_then(Value::as_str) {
            let is_none = address.eq_ignore_ascii_case("none");
            if is_none != current["ipv4"].is_null() || !is_none && current["ipv4"] != address {
                found.push(Difference::fixed(field("address"), &current["ipv4"], &json!(address)));
            }
        }
        if let Some(mac) = interface.get("macaddress").and_then(Value::as_str)
            && !text(&current["macaddr"]).eq_ignore_ascii_case(mac)
        {
            found.push(Difference::fixed(field("macaddress"), &current["macaddr"], &json!(mac)));
        }
        if let Some(model) = interface.get("model").filter(|model| current["model"] != **model) {
            found.push(Difference::fixed(field("model"), &current["model"], model));
        }
        let has_float = !current["floating"].is_null();
        if let Some(float) =
            interface.get("float").and_then(Value::as_bool).filter(|float| *float != has_float)
        {
            let edits = vec![Edit::Float(text(&current["uuid"]), float)];
            found.push(Difference::editable(field("float"), has_float.into(), float.into(), edits));
        }
    }
    if wanted.len() < current.len() {
        let count = |interfaces: usize| json!(format!("{interfaces} interfaces"));
        found.push(Difference::fixed("network", &count(current.len()), &count(wanted.len())));
    }
    found
}
