//! The requests of one object.

use std::cell::Cell;

use anyhow::{Context as _, anyhow, bail};
use muster_types::artifact::ArtifactType;
use reqwest::Method;
use serde_json::{Value, json};

use super::compare::{Difference, Edit, differences, encode_user_data, local_file};
use super::execute::{Part, Run};
use super::manifest::{Declared, Identity};
use super::observed::{Cluster, Condition, Observed, UPLOAD_SOURCE, artifact_type};
use super::ownership::{MARK, Mark};
use super::plan::{Action, Step};
use super::schema::Kind;
use crate::api::{ApiResponse, Client, Error, NewInterface, NewVersion};
use crate::commands::artifact_transfer::{NOTHING_SENT, store_file};
use crate::commands::instance::wait_until_deleted;
use crate::commands::instance_specs::resolve_image;
use crate::commands::operation;
use crate::exit_code::timed_out;
use crate::output::escape_control;
use crate::transfer::{Retries, RetryPolicy};

/// Performs one part of a step, and returns what was done.
pub(super) async fn perform(
    run: &Run<'_>,
    step: &Step,
    part: Part,
    is_needed: bool,
) -> anyhow::Result<String> {
    let title = step.identity.title();
    if part == Part::Delete {
        let object = step.observed.as_ref().context("the object does not exist")?;
        delete(run, object, is_needed).await?;
        return Ok(format!("{title} deleted"));
    }
    let Some(declared) = &step.declared else {
        if let Some(object) = &step.observed {
            run.session.client.delete_metadata(object.path(), MARK).await?;
        }
        return Ok(format!("{title} released"));
    };
    let (observed, done) = match (&step.observed, step.action) {
        (Some(object), Action::Update | Action::Adopt | Action::Wait) => (
            object.clone(),
            match step.action {
                Action::Adopt => "adopted",
                Action::Wait => "is ready",
                _ => "updated",
            },
        ),
        _ => (create(run, declared).await?, "created"),
    };
    if step.action != Action::Wait {
        change(run, step, declared, &observed).await?;
    }
    wait_until_ready(run, &step.identity, &observed.id, is_needed).await?;
    Ok(format!("{title} {done}"))
}

/// Changes what differs, and then records it in the mark.
async fn change(run: &Run<'_>, step: &Step, declared: &Declared, observed: &Observed) -> anyhow::Result<()> {
    let client = &run.session.client;
    let is_new = !matches!(step.action, Action::Update | Action::Adopt);
    let of_new;
    let found = if is_new {
        of_new = differences_of_new(run, declared, observed).await?;
        &of_new
    } else {
        &step.differences
    };
    let mut sent: Vec<&Edit> = vec![];
    for edit in found.iter().flat_map(|difference| difference.edits.iter().flatten()) {
        // Several fields may have the same request.
        let is_repeated = sent.contains(&edit) && *edit != Edit::Route;
        if !is_repeated {
            send(run, declared, observed, edit).await?;
            sent.push(edit);
        }
    }
    let mark = step.final_mark(run.set).context("the object is not in the files")?;
    if observed.mark.as_ref() != Some(&mark) {
        client.set_metadata(observed.path(), MARK, &mark.to_json()).await?;
    }
    Ok(())
}

/// Returns what is not part of the creation of an object.
async fn differences_of_new(
    run: &Run<'_>,
    declared: &Declared,
    observed: &Observed,
) -> anyhow::Result<Vec<Difference>> {
    let mut declared = declared.clone();
    match declared.identity.kind {
        Kind::Instance => return Ok(vec![]),
        Kind::Network => {
            let later = ["dns", "reserved", "routed_addresses"];
            if later.iter().any(|field| declared.fields.contains_key(*field)) {
                wait_until_ready(run, &declared.identity, &observed.id, true).await?;
            }
        }
        Kind::Artifact => drop(declared.fields.remove("file")),
        Kind::Namespace | Kind::Issuer | Kind::Rule => {}
    }
    differences(&run.session.client, &Cluster::default(), &declared, observed).await
}

/// Creates an object with its mark.
async fn create(run: &Run<'_>, declared: &Declared) -> anyhow::Result<Observed> {
    let client = &run.session.client;
    let Identity { kind, namespace, name } = &declared.identity;
    let namespace = namespace.as_deref().unwrap_or_default();
    let fields = Value::Object(declared.fields.clone());
    let terms = || {
        let mut terms = declared.fields.clone();
        terms.remove("metadata");
        Value::Object(terms)
    };
    let record = match kind {
        Kind::Namespace => client.create_namespace(name, None).await?.json().clone(),
        Kind::Issuer => client.create_issuer(name, &serde_json::from_value(terms())?).await?.json().clone(),
        Kind::Rule => {
            client.create_rule(namespace, name, &serde_json::from_value(terms())?).await?.json().clone()
        }
        Kind::Network => {
            let mut body = json!({ "name": name, "namespace": namespace });
            for field in ["netblock", "provide_dhcp", "provide_nat", "provide_dns"] {
                if let Some(value) = fields.get(field) {
                    body[field] = value.clone();
                }
            }
            post(client, "/networks", body).await?
        }
        Kind::Artifact => transfer(run, declared, None).await?,
        Kind::Instance => post(client, "/instances", instance_body(run, declared).await?).await?,
    };
    let mut observed =
        Observed::new(*kind, record).ok_or_else(|| anyhow!("the server returned a deleted object"))?;
    run.ids.borrow_mut().insert(declared.identity.clone(), observed.id.clone());
    if observed.mark.is_none() {
        let mark = Mark::new(run.set, true);
        client.set_metadata(observed.path(), MARK, &mark.to_json()).await?;
        observed.mark = Some(mark);
    }
    Ok(observed)
}

/// Sends a request whose body has only the fields of the file.
async fn post(client: &Client, path: &str, body: Value) -> anyhow::Result<Value> {
    let response = client.request_any(Method::POST, path, &[], Some(body)).await?;
    match response.refusal {
        Some(refusal) => Err(refusal.into()),
        None => Ok(serde_json::from_slice(&response.body)?),
    }
}

async fn instance_body(run: &Run<'_>, declared: &Declared) -> anyhow::Result<Value> {
    let mut body = declared.fields.clone();
    body.insert("name".to_owned(), declared.identity.name.clone().into());
    body.insert("namespace".to_owned(), declared.identity.namespace.clone().into());
    if let Some(Value::String(data)) = body.get_mut("user_data") {
        *data = encode_user_data(data);
    }
    if let Some(Value::String(key)) = body.get_mut("ssh_key") {
        *key = key.trim().to_owned();
    }
    for interface in body.get_mut("network").and_then(Value::as_array_mut).into_iter().flatten() {
        interface["network_uuid"] = network_id(run, declared, &interface["network_uuid"]).into();
    }
    for disk in body.get_mut("disk").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(Value::String(base)) = disk.get_mut("base") {
            *base = image(run, declared, base).await?;
        }
    }
    let mut metadata = declared.entries("metadata");
    metadata.retain(|_, value| !value.is_null());
    metadata.insert(MARK.to_owned(), Mark::new(run.set, true).with_entries(declared).to_json());
    body.insert("metadata".to_owned(), metadata.into());
    Ok(body.into())
}

/// Returns the id of an object in the namespace of the instance that refers to it, if the files contain it.
fn known_id(run: &Run<'_>, declared: &Declared, kind: Kind, name: &str) -> Option<String> {
    let identity = Identity { kind, namespace: declared.identity.namespace.clone(), name: name.to_owned() };
    run.ids.borrow().get(&identity).cloned()
}

fn network_id(run: &Run<'_>, declared: &Declared, name: &Value) -> String {
    let name = name.as_str().unwrap_or_default();
    known_id(run, declared, Kind::Network, name).unwrap_or_else(|| name.to_owned())
}

async fn image(run: &Run<'_>, declared: &Declared, name: &str) -> anyhow::Result<String> {
    // The server fetches URLs itself.
    match known_id(run, declared, Kind::Artifact, name).filter(|_| !name.contains([':', '/'])) {
        Some(id) => Ok(format!("sf://artifact/{id}")),
        None => Ok(resolve_image(&run.session.client, name).await?),
    }
}

/// Uploads or fetches the content of an artifact, and returns its record. An existing artifact keeps its source, by which the
/// server finds it.
async fn transfer(run: &Run<'_>, declared: &Declared, existing: Option<&Observed>) -> anyhow::Result<Value> {
    let client = &run.session.client;
    let namespace = declared.identity.namespace.clone();
    let shared = declared.fields.get("shared").and_then(Value::as_bool).unwrap_or(false);
    let Some(file) = local_file(declared) else {
        let url = &declared.identity.name;
        let response = client.fetch_artifact(url, shared, namespace.as_deref(), false).await?;
        return Ok(response.json().clone());
    };
    let default_source = format!("{UPLOAD_SOURCE}{}/{}", client.own_namespace(), declared.identity.name);
    let source_url = existing.and_then(|artifact| artifact.record["source_url"].as_str());
    let source_url = source_url.filter(|source| *source != default_source).map(str::to_owned);
    let version = NewVersion {
        name: declared.identity.name.clone(),
        artifact_type: artifact_type(declared).parse::<ArtifactType>().map_err(anyhow::Error::msg)?,
        source_url,
        shared,
        namespace,
    };
    let consequence = Cell::new(NOTHING_SENT);
    // An interrupted upload is resumed by the next run.
    let stored = run.unless_stopped(store_file(client, &file, &version, true, &consequence)).await?;
    Ok(stored.0.json().clone())
}

/// Sends the request of one difference.
async fn send(run: &Run<'_>, declared: &Declared, observed: &Observed, edit: &Edit) -> anyhow::Result<()> {
    let (client, id) = (&run.session.client, observed.id.as_str());
    match edit {
        Edit::SetMetadata(key, value) => drop(client.set_metadata(observed.path(), key, value).await?),
        Edit::DeleteMetadata(key) => drop(client.delete_metadata(observed.path(), key).await?),
        Edit::SetQuota(name, limit) => drop(client.set_quota(id, *name, *limit).await?),
        Edit::ResetQuota(name) => drop(client.reset_quota(id, *name).await?),
        Edit::AddTrust(other) => drop(client.add_trust(id, other).await?),
        Edit::RemoveTrust(other) => unless_missing(client.remove_trust(id, other).await)?,
        Edit::PutTerms => put_terms(client, declared, id).await?,
        Edit::SetName(name, address) => drop(client.set_network_name(id, name, address).await?),
        Edit::DeleteName(name) => unless_missing(client.delete_network_name(id, name).await)?,
        Edit::Reserve(address, comment) => drop(client.reserve_address(id, address, Some(comment)).await?),
        Edit::Release(address) => unless_missing(client.release_address(id, address).await)?,
        Edit::Route => drop(client.route_address(id).await?),
        Edit::Unroute(address) => unless_missing(client.unroute_address(id, address).await)?,
        Edit::Share(true) => drop(client.share_artifact(id.into()).await?),
        Edit::Share(false) => drop(client.unshare_artifact(id.into()).await?),
        Edit::SetMaxVersions(count) => drop(client.set_max_versions(id.into(), *count).await?),
        Edit::Transfer => drop(transfer(run, declared, Some(observed)).await?),
        Edit::SetFencing(fencing, restart) => drop(client.set_fencing(id, *fencing, *restart).await?),
        Edit::Float(interface, true) => drop(client.float_interface(interface).await?),
        Edit::Float(interface, false) => unless_missing(client.defloat_interface(interface).await)?,
        Edit::Plug(interface) => {
            let text = |name: &str| interface.get(name).and_then(Value::as_str).map(str::to_owned);
            let new = NewInterface {
                network_uuid: network_id(run, declared, &interface["network_uuid"]),
                address: text("address"),
                macaddress: text("macaddress"),
                model: text("model"),
                float: interface.get("float").and_then(Value::as_bool).unwrap_or(false),
            };
            client.plug_interface(id, &new).await?;
        }
    }
    Ok(())
}

/// Ignores that something to remove does not exist.
fn unless_missing<T>(response: Result<ApiResponse<T>, Error>) -> Result<(), Error> {
    match response {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

async fn put_terms(client: &Client, declared: &Declared, name: &str) -> anyhow::Result<()> {
    let mut terms = declared.fields.clone();
    terms.remove("metadata");
    let terms = Value::Object(terms);
    if declared.identity.kind == Kind::Issuer {
        client.update_issuer(name, &serde_json::from_value(terms)?).await?;
    } else {
        let namespace = declared.identity.namespace.as_deref().unwrap_or_default();
        client.update_rule(namespace, name, &serde_json::from_value(terms)?).await?;
    }
    Ok(())
}

/// Waits until an object can be used.
async fn wait_until_ready(
    run: &Run<'_>,
    identity: &Identity,
    id: &str,
    is_needed: bool,
) -> anyhow::Result<()> {
    let Some(mut timer) = run.timer(is_needed) else { return Ok(()) };
    let client = &run.session.client;
    let mut retries = Retries::new(RetryPolicy::default());
    let wait = async {
        loop {
            let record = match identity.kind {
                Kind::Network => client.network(id).await.map(|response| response.json().clone()),
                Kind::Instance => client.instance(id).await.map(|response| response.json().clone()),
                Kind::Artifact => client.artifact(id.into()).await.map(|response| response.json().clone()),
                Kind::Namespace | Kind::Issuer | Kind::Rule => return Ok(()),
            };
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    retries.back_off(error, None).await?;
                    continue;
                }
            };
            retries.reset();
            match Observed::new(identity.kind, record).map(|object| object.condition) {
                Some(Condition::Ready) => return Ok(()),
                Some(Condition::Pending) => {}
                Some(Condition::Failed(reason)) => bail!("{}", escape_control(&reason)),
                None => bail!("it was deleted meanwhile"),
            }
            if !timer.tick().await {
                return Err(timed_out("timed out; its creation continues"));
            }
        }
    };
    run.unless_stopped(wait).await
}

/// Deletes an object. With `wait`, until it is deleted.
async fn delete(run: &Run<'_>, object: &Observed, wait: bool) -> anyhow::Result<()> {
    let (client, id) = (&run.session.client, object.id.as_str());
    let namespace = object.identity.namespace.as_deref().unwrap_or_default();
    let timer = run.timer(wait);
    match object.identity.kind {
        Kind::Namespace => unless_missing(client.delete_namespace(id).await)?,
        Kind::Issuer => unless_missing(client.delete_issuer(id).await)?,
        Kind::Rule => unless_missing(client.delete_rule(namespace, id).await)?,
        Kind::Artifact => unless_missing(client.delete_artifact(id.into()).await)?,
        Kind::Network => {
            let handle = match client.delete_network(id).await {
                Err(error) if error.is_not_found() => return Ok(()),
                other => other?.value()?,
            };
            let Some(timer) = timer else { return Ok(()) };
            let consequence = format!("the deletion continues: see `muster network why {id}`");
            let wait = operation::wait_until_complete(client, &handle, timer, &consequence);
            if let Some(reason) = run.unless_stopped(wait).await? {
                bail!("failed to delete it: {reason}");
            }
        }
        Kind::Instance => {
            match client.delete_instance(id).await {
                Err(error) if error.is_not_found() => return Ok(()),
                other => drop(other?),
            }
            let Some(mut timer) = timer else { return Ok(()) };
            let wait = wait_until_deleted(run.session, &object.identity.name, id.parse()?, &mut timer);
            run.unless_stopped(wait).await?;
        }
    }
    Ok(())
}
