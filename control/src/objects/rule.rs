//! Mapping rules of a namespace: create, get, list, update, delete. Callers that may create keys may create rules,
//! because rules create keys. See docs/decisions/0025.

use muster_types::event::{Event, EventType};
use muster_types::ids::RuleId;
use muster_types::issuer::check_name;
use muster_types::namespace::{NamespaceState, SYSTEM_NAMESPACE};
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::rule::{
    RuleRecord, RuleState, RuleTerms, check_bound_claims, check_issuer, check_key_name_prefix, check_key_ttl,
    check_scopes,
};
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::auth::Caller;
use crate::auth::access::{delegable_scopes, require_namespace};
use crate::auth::scopes;
use crate::objects::audit::with_request;
use muster_store::rules::RuleRow;
use muster_store::{StoreError, issuers, metadata, namespaces, rules, transaction};

/// The version of the record's format.
const VERSION: i64 = 1;

/// The terms of a rule as requested, not validated yet.
#[derive(Debug, Clone, Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewRuleTerms)]
#[schema(example = json!({
    "issuer": "forge", "bound_claims": {"repository": "example/web"},
    "scopes": ["instance.read"], "key_ttl": 900, "key_name_prefix": "deploy"
}))]
pub struct RuleRequest {
    /// Name of the issuer whose tokens are accepted.
    #[schema(value_type = String)]
    pub issuer: Option<Value>,
    /// The JWT claims that a token must have, by name: a string, or a list of which one must match.
    #[schema(value_type = std::collections::BTreeMap<String, muster_types::rule::ClaimMatcher>)]
    pub bound_claims: Option<Value>,
    /// The scopes of the keys; at most the caller's own.
    #[schema(value_type = Vec<String>)]
    pub scopes: Option<Value>,
    /// Lifetime of the keys in seconds; at most one day.
    #[schema(value_type = i64)]
    pub key_ttl: Option<Value>,
    /// Prefix of the names of the keys.
    #[schema(value_type = String)]
    pub key_name_prefix: Option<Value>,
}

impl RuleRequest {
    /// Validates the terms, including that the caller holds the scopes that they grant.
    async fn check(&self, app: &App, caller: &Caller, namespace: &str) -> Result<RuleTerms> {
        let (Some(issuer), Some(bound_claims), Some(scopes), Some(key_ttl), Some(key_name_prefix)) =
            (&self.issuer, &self.bound_claims, &self.scopes, &self.key_ttl, &self.key_name_prefix)
        else {
            return Err(self.missing());
        };
        require_granted(delegable_scopes(&*app.store, caller, namespace).await?.as_deref(), scopes)?;
        let issuer = check_issuer(issuer)?;
        // Not part of the transaction: an issuer can be deleted at any time, and its rules stay.
        if issuers::by_name(&*app.store, &issuer).await?.is_none() {
            return Err(Error::Invalid(format!("no trusted issuer named \"{issuer}\"")));
        }
        Ok(RuleTerms {
            issuer,
            bound_claims: check_bound_claims(bound_claims)?,
            scopes: check_scopes(scopes)?,
            key_ttl: check_key_ttl(key_ttl)?,
            key_name_prefix: check_key_name_prefix(key_name_prefix)?,
        })
    }

    fn missing(&self) -> Error {
        let fields = [
            ("issuer", &self.issuer),
            ("bound_claims", &self.bound_claims),
            ("scopes", &self.scopes),
            ("key_ttl", &self.key_ttl),
            ("key_name_prefix", &self.key_name_prefix),
        ];
        let missing: Vec<&str> =
            fields.iter().filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
        Error::Invalid(format!("missing required field(s): {}", missing.join(", ")))
    }
}

/// Rejects a rule that grants scopes that the caller was not granted.
fn require_granted(held: Option<&[String]>, wanted: &Value) -> Result<()> {
    let wanted = wanted.as_array().into_iter().flatten().filter_map(Value::as_str);
    // Empty scopes are rejected later as invalid.
    let mut excess: Vec<&str> =
        wanted.filter(|scope| !scope.is_empty() && !scopes::grants(held, scope)).collect();
    if excess.is_empty() {
        return Ok(());
    }
    excess.sort_unstable();
    excess.dedup();
    Err(Error::Forbidden(format!("a rule cannot grant scopes you do not hold: {}", excess.join(", "))))
}

/// Returns the rules of a namespace that are not deleted, by name.
pub async fn list(app: &App, caller: &Caller, namespace: &str) -> Result<Vec<RuleRecord>> {
    require_namespace(&*app.store, caller, namespace).await?;
    records(app, rules::list(&*app.store, namespace).await?).await
}

/// Returns a rule that is not deleted.
pub async fn get(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<RuleRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let found = rules::with_metadata(&*app.store, namespace, name).await?;
    let (row, metadata) = found.ok_or_else(absent)?;
    Ok(record(row, metadata))
}

/// Returns the rule as the subject of events and metadata.
pub async fn subject(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<ObjectRef> {
    Ok(object(find(app, caller, namespace, name).await?.id))
}

async fn find(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<RuleRow> {
    require_namespace(&*app.store, caller, namespace).await?;
    rules::by_name(&*app.store, namespace, name).await?.ok_or_else(absent)
}

/// Creates a rule.
pub async fn create(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: Option<&Value>,
    request: &RuleRequest,
) -> Result<RuleRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let requested_name: Option<String> =
        name.and_then(Value::as_str).map(|name| name.chars().take(255).collect());
    let event = Event::audit(ObjectRef::namespace(namespace), "create mapping rule request from REST API");
    app.record(caller, event.with("rule", requested_name));
    let name = check_name(name)?;
    let terms = request.check(app, caller, namespace).await?;
    let row = transaction!(app.store, |tx| {
        if !namespaces::lock(tx, namespace, NamespaceState::Created).await? {
            return Err(Error::not_found("namespace").into());
        }
        match rules::insert(tx, namespace, name, &terms).await {
            Ok(row) => Ok(row),
            Err(StoreError::Duplicate(_)) => Err(Error::Conflict("rule already exists".into()).into()),
            Err(error) => Err(error.into()),
        }
    })?;
    let event = terms_event(caller, EventType::Audit, &row, "db record created");
    app.record(caller, event.with("namespace", namespace).with("name", name));
    record_system_rule(app, caller, &row);
    to_record(app, row).await
}

/// Replaces all terms of a rule. Its existing keys do not change.
pub async fn update(
    app: &App,
    caller: &Caller,
    namespace: &str,
    name: &str,
    request: &RuleRequest,
) -> Result<RuleRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let terms = request.check(app, caller, namespace).await?;
    let row = transaction!(app.store, |tx| {
        let mut row = rules::by_name(&mut *tx, namespace, name).await?.ok_or_else(absent)?;
        if !rules::update(tx, row.id, &terms).await? {
            return Err(absent().into());
        }
        row.terms = terms.clone();
        Ok(row)
    })?;
    app.record(caller, terms_event(caller, EventType::Mutate, &row, "updated mapping rule"));
    record_system_rule(app, caller, &row);
    to_record(app, row).await
}

/// Deletes a rule. Its existing keys do not change.
pub async fn delete(app: &App, caller: &Caller, namespace: &str, name: &str) -> Result<RuleRecord> {
    require_namespace(&*app.store, caller, namespace).await?;
    let row = transaction!(app.store, |tx| {
        let mut row = rules::by_name(&mut *tx, namespace, name).await?.ok_or_else(absent)?;
        if !rules::soft_delete(tx, row.id).await? {
            return Err(absent().into());
        }
        row.state = RuleState::Deleted;
        Ok(row)
    })?;
    let event = Event::audit(object(row.id), "delete mapping rule request from REST API");
    app.record(caller, caller_event(caller, &row, event));
    to_record(app, row).await
}

fn absent() -> Error {
    Error::not_found("rule")
}

fn object(id: RuleId) -> ObjectRef {
    ObjectRef::new(ObjectType::Rule, id)
}

/// Adds the caller to an event, which may be of a trusted namespace. The rule's namespace keeps the event after the
/// rule is removed.
fn caller_event(caller: &Caller, row: &RuleRow, event: Event) -> Event {
    with_request(caller, event)
        .with_object(ObjectRef::namespace(&row.namespace))
        .with("rule", row.name.clone())
        .with("caller-namespace", caller.namespace.clone())
}

/// Returns an event with the terms of a rule and the caller.
fn terms_event(caller: &Caller, event_type: EventType, row: &RuleRow, message: &str) -> Event {
    let terms = &row.terms;
    caller_event(caller, row, Event::new(event_type, object(row.id), message))
        .with("issuer", terms.issuer.clone())
        .with("bound_claims", json!(terms.bound_claims))
        .with("scopes", json!(terms.scopes))
        .with("key_ttl", terms.key_ttl)
        .with("key_name_prefix", terms.key_name_prefix.clone())
}

/// Records a rule that grants keys of `system`, because they have access to the whole cluster.
fn record_system_rule(app: &App, caller: &Caller, row: &RuleRow) {
    if row.namespace != SYSTEM_NAMESPACE {
        return;
    }
    let (rule, issuer) = (&row.name, &row.terms.issuer);
    tracing::warn!(%rule, %issuer, key = %caller.key_name, "a mapping rule targets the system namespace");
    let event = Event::audit(object(row.id), "mapping rule targets the system namespace")
        .with("issuer", issuer.clone())
        .with("bound_claims", json!(row.terms.bound_claims))
        .with("scopes", json!(row.terms.scopes));
    app.record(caller, caller_event(caller, row, event));
}

/// Returns the record of a row, with its metadata.
async fn to_record(app: &App, row: RuleRow) -> Result<RuleRecord> {
    let metadata = metadata::get(&*app.store, ObjectType::Rule, &row.id.to_string()).await?;
    Ok(record(row, metadata))
}

/// Returns the records of rows, with their metadata.
async fn records(app: &App, rows: Vec<RuleRow>) -> Result<Vec<RuleRecord>> {
    let ids: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
    let mut metadata_of = metadata::of_objects(&*app.store, ObjectType::Rule, &ids).await?;
    let records = rows.into_iter().zip(ids);
    Ok(records.map(|(row, id)| record(row, metadata_of.remove(&id).unwrap_or_default())).collect())
}

fn record(row: RuleRow, metadata: Map<String, Value>) -> RuleRecord {
    RuleRecord {
        uuid: row.id,
        state: row.state,
        version: VERSION,
        metadata,
        namespace: row.namespace,
        name: row.name,
        issuer: row.terms.issuer,
        bound_claims: row.terms.bound_claims,
        scopes: row.terms.scopes,
        key_ttl: row.terms.key_ttl,
        key_name_prefix: row.terms.key_name_prefix,
    }
}
