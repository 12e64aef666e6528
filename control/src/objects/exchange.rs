//! Federated exchange: exchanges a token of a trusted issuer for a key of a namespace, according to a rule.
//!
//! Callers are unauthenticated, so every step must succeed, and each step reads only what it needs. The response names
//! the failed step but not the cause, which only the owner of the rule can see. See docs/decisions/0024.

use std::fmt;

use muster_types::event::Event;
use muster_types::ids::{KeyId, RuleId};
use muster_types::key::{Secret, random_alphanumeric};
use muster_types::namespace::NamespaceState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::quota::QuotaName;
use muster_types::rule::{
    ClaimMatcher, RuleTerms, check_bound_claims, check_key_name_prefix, check_key_ttl, check_scopes,
};
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::auth::Origin;
use crate::auth::identity::{Identity, IdentityError, unverified_issuer};
use crate::auth::secrets::HashRequester;
use crate::events::RefusalKind;
use crate::objects::key::key_event;
use crate::objects::quota;
use muster_store::issuers::IssuerRow;
use muster_store::keys::{NewKey, PutOutcome, StoredSecret};
use muster_store::rules::{FoundRule, RuleRow};
use muster_store::{
    StoreError, Tx, TxError, beside_change, exchanges, issuers, keys, namespaces, rules, transaction,
};

/// The number of random characters at the end of a key's name.
const NAME_SUFFIX_CHARS: usize = 8;
/// The number of random names to try. The second is hardly ever needed.
const NAME_ATTEMPTS: usize = 8;
/// The maximum number of characters of untrusted text that are logged.
const MAX_TEXT_CHARS: usize = 256;
/// The maximum number of characters of a detail for the owner of a rule.
const MAX_DETAIL_CHARS: usize = 1024;

/// A request to exchange an identity token for a key, not validated yet.
#[derive(Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewExchange)]
#[schema(example = json!({"token": "eyJhbGciOiJSUzI1NiJ9.e30.c2lnbmF0dXJl", "namespace": "ci", "rule": "deploy"}))]
pub struct ExchangeRequest {
    /// The identity token of a trusted issuer.
    #[schema(value_type = String)]
    pub token: Option<Value>,
    /// The namespace of the key.
    #[schema(value_type = String)]
    pub namespace: Option<Value>,
    /// Name of a mapping rule of that namespace.
    #[schema(value_type = String)]
    pub rule: Option<Value>,
}

/// Omits the token, which is a credential.
impl fmt::Debug for ExchangeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExchangeRequest(…)")
    }
}

/// A key that an exchange created.
#[derive(Debug)]
pub struct MintedKey {
    pub namespace: String,
    pub key_name: String,
    /// It cannot be retrieved later.
    pub key: Secret,
}

/// Exchanges a token for a key.
pub async fn create(app: &App, request: &ExchangeRequest, origin: Origin<'_>) -> Result<MintedKey> {
    let token = required("token", request.token.as_ref())?;
    let namespace = required("namespace", request.namespace.as_ref())?;
    let rule = required("rule", request.rule.as_ref())?;
    count_attempt(app, origin.source).await?;
    Attempt { app, token, namespace, rule, origin }.run().await
}

fn required<'a>(field: &str, value: Option<&'a Value>) -> Result<&'a str> {
    let text = value.and_then(Value::as_str).filter(|text| !text.is_empty());
    text.ok_or_else(|| Error::Invalid(format!("no {field} specified")))
}

/// Counts an attempt of an address across the cluster, and rejects it if there were too many in this minute. Counting
/// comes first, so that rejected attempts count too.
async fn count_attempt(app: &App, source: &str) -> Result<()> {
    let limit = app.settings.federation_rate_limit_per_minute;
    if limit <= 0 {
        return Ok(());
    }
    let (minute, retry_after) = minute_at(now());
    let too_many =
        || Error::TooManyRequests { text: "too many federated exchange attempts".into(), retry_after };
    // The limit is already exceeded: avoid writes during a flood.
    if exchanges::attempts(&*app.store, source, minute).await? > limit {
        return Err(too_many());
    }
    let attempts = beside_change(async {
        transaction!(app.store, |tx| { Ok(exchanges::count_attempt(tx, source, minute).await?) })
    });
    let attempts = attempts.await?;
    if attempts <= limit {
        return Ok(());
    }
    if attempts == limit + 1 {
        tracing::warn!(source, limit, "too many federated exchange attempts in this minute");
    }
    Err(too_many())
}

/// Returns the minute of a Unix time since the epoch, and the seconds until it ends.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Unix time is positive and small"
)]
fn minute_at(time: f64) -> (i64, u64) {
    let remaining = 60.0 - time.rem_euclid(60.0);
    ((time / 60.0).floor() as i64, (remaining.ceil() as u64).max(1))
}

/// Why an exchange is refused. The caller sees the reason, the owner of the rule also the detail.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    reason: &'static str,
    detail: String,
}

fn refusal(reason: &'static str, detail: impl Into<String>) -> Refusal {
    Refusal { reason, detail: detail.into() }
}

/// What a rule grants for a token.
#[derive(Debug)]
struct Grant {
    rule: RuleRow,
    /// The claims that the rule requires.
    claims: Map<String, Value>,
}

/// A key that was written.
#[derive(Debug)]
struct CreatedKey {
    id: KeyId,
    name: String,
    expiry: f64,
    grant: Grant,
}

/// An attempt that was counted.
struct Attempt<'a> {
    app: &'a App,
    token: &'a str,
    namespace: &'a str,
    rule: &'a str,
    origin: Origin<'a>,
}

impl Attempt<'_> {
    async fn run(&self) -> Result<MintedKey> {
        let app = self.app;
        let issuer = self.issuer().await?;
        let identity = match app.identities.verify(&issuer, self.token, now()).await {
            Ok(identity) => identity,
            Err(IdentityError::Token(reason)) => {
                let detail = format!("of issuer {}: {reason}", issuer.name);
                return Err(self.refuse(None, &refusal("token rejected", detail)));
            }
            Err(IdentityError::CaBundle(reason)) => {
                tracing::warn!(source = self.origin.source, %reason, "federated exchange is unavailable");
                let text = "federated exchange is unavailable, please retry";
                return Err(Error::Unavailable(text.into()));
            }
        };
        let Some(found) = rules::find(&*app.store, self.namespace, self.rule).await? else {
            return Err(self.refuse(None, &no_rule()));
        };
        let id = found.id;
        if let Err(refusal) = evaluate(found, &issuer, &identity) {
            return Err(self.refuse(Some(id), &refusal));
        }
        let namespace = namespaces::get(&*app.store, self.namespace).await?;
        if namespace.is_none_or(|row| row.state != NamespaceState::Created) {
            return Err(self.refuse(Some(id), &no_namespace()));
        }
        let key = Secret::generate();
        let sealed = app.secrets.seal(HashRequester::cluster(self.namespace), &key).await?;
        let created = transaction!(app.store, |tx| {
            Ok(self.create_key(tx, id, &issuer, &identity, &sealed).await?)
        })?;
        match created {
            Ok(created) => {
                self.record_created(&created);
                Ok(MintedKey { namespace: self.namespace.to_owned(), key_name: created.name, key })
            }
            Err(refusal) => Err(self.refuse(Some(id), &refusal)),
        }
    }

    /// Returns the trusted issuer that the token names, before the token is verified.
    async fn issuer(&self) -> Result<IssuerRow> {
        let Some(url) = unverified_issuer(self.token) else {
            return Err(self.refuse(None, &refusal("untrusted issuer", "the token names no issuer")));
        };
        let row = issuers::by_url(&*self.app.store, &url).await?;
        // The row was found by a hash of the URL.
        row.filter(|row| row.terms.issuer_url == url).ok_or_else(|| {
            let detail = format!("the issuer of the token is {}", printable(&url, MAX_TEXT_CHARS));
            self.refuse(None, &refusal("untrusted issuer", detail))
        })
    }

    /// Marks the token as used and creates the key in one transaction. Namespace, rule and issuer are checked again
    /// under locks, so that no key is created after one of them is deleted. A refusal changes nothing.
    async fn create_key(
        &self,
        tx: &mut Tx,
        rule: RuleId,
        issuer: &IssuerRow,
        identity: &Identity,
        secret: &StoredSecret,
    ) -> Result<Result<CreatedKey, Refusal>, StoreError> {
        if !namespaces::lock(tx, self.namespace, NamespaceState::Created).await? {
            return Ok(Err(no_namespace()));
        }
        if !rules::lock(tx, rule).await? {
            return Ok(Err(no_rule()));
        }
        let found = rules::find(&mut *tx, self.namespace, self.rule).await?;
        let Some(found) = found.filter(|found| found.id == rule) else { return Ok(Err(no_rule())) };
        let grant = match evaluate(found, issuer, identity) {
            Ok(grant) => grant,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let trusted = issuers::lock(tx, issuer.id).await?
            && issuers::by_name(&mut *tx, &issuer.name).await?.as_ref() == Some(issuer);
        if !trusted {
            return Ok(Err(refusal("untrusted issuer", "the issuer was changed or deleted meanwhile")));
        }
        if identity.expires <= now() {
            return Ok(Err(refusal("token rejected", "the token expired meanwhile")));
        }
        match quota::require_in(self.app, tx, self.namespace, &[(QuotaName::Keys, 1)]).await {
            Ok(()) => {}
            Err(TxError::Rejected(error)) => return Ok(Err(refusal("quota exceeded", error.to_string()))),
            Err(TxError::Store(error)) => return Err(error),
        }
        let url = &issuer.terms.issuer_url;
        if !exchanges::consume_token(tx, rule, url, &identity.token_id, identity.expires).await? {
            return Ok(Err(refusal("token already used", "the rule has already accepted this token")));
        }
        let terms = &grant.rule.terms;
        #[expect(clippy::cast_precision_loss, reason = "a day at most")]
        let expiry = now() + terms.key_ttl as f64;
        let new = NewKey {
            secret: secret.clone(),
            expiry: Some(expiry),
            scopes: Some(terms.scopes.clone()),
            provenance: Some(provenance(&grant, identity)),
        };
        for _ in 0..NAME_ATTEMPTS {
            let name = format!("{}-{}", terms.key_name_prefix, random_alphanumeric(NAME_SUFFIX_CHARS));
            match keys::insert(tx, self.namespace, &name, &new).await {
                Ok(id) => return Ok(Ok(CreatedKey { id, name, expiry, grant })),
                // The name is taken: try another one.
                Err(StoreError::Duplicate(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::Conflict("failed to generate an unused key name".into()))
    }

    /// Records the new key and the rule that granted it.
    fn record_created(&self, created: &CreatedKey) {
        let rule = &created.grant.rule;
        let object = ObjectRef::new(ObjectType::NamespaceKey, created.id);
        self.record(
            key_event(PutOutcome::Created(created.id), self.namespace, &created.name)
                .with("expiry", created.expiry),
        );
        self.app.metrics.exchanged(true);
        let minted = |event: Event| {
            event
                .with("rule", rule.id.to_string())
                .with("rule_name", rule.name.clone())
                .with("issuer", rule.terms.issuer.clone())
                .with("claims", created.grant.claims.clone())
                .with("remote-address", self.origin.remote)
        };
        let event = minted(Event::audit(object, "key minted by federated exchange"));
        self.record(event.with("scopes", json!(rule.terms.scopes)));
        let namespace = ObjectRef::namespace(self.namespace);
        let event = minted(Event::audit(namespace, "federated exchange minted a key"));
        self.record(event.with("key_name", created.name.clone()));
    }

    fn record(&self, mut event: Event) {
        event.request_id = Some(self.origin.request_id.to_owned());
        self.app.events.record(event);
    }

    /// Logs a refusal, records it for the owner of the rule if there is one, and returns the error.
    fn refuse(&self, rule: Option<RuleId>, refusal: &Refusal) -> Error {
        self.app.metrics.exchanged(false);
        let detail = printable(&refusal.detail, MAX_DETAIL_CHARS);
        tracing::info!(
            source = self.origin.source,
            namespace = printable(self.namespace, MAX_TEXT_CHARS),
            rule = printable(self.rule, MAX_TEXT_CHARS),
            reason = refusal.reason,
            detail,
            "federated exchange refused"
        );
        if let Some(rule) = rule {
            let object = ObjectRef::new(ObjectType::Rule, rule);
            let mut event = Event::audit(object, "federated exchange refused")
                .with("reason", refusal.reason)
                .with("detail", detail)
                .with("remote-address", self.origin.remote);
            event.request_id = Some(self.origin.request_id.to_owned());
            self.app.events.record_refusal(RefusalKind::Exchange, self.origin.source, event);
        }
        Error::Unauthenticated(format!("federated exchange refused: {}", refusal.reason))
    }
}

fn no_rule() -> Refusal {
    refusal("no such rule", "the namespace has no such rule")
}

fn no_namespace() -> Refusal {
    refusal("no such namespace", "the namespace is deleted")
}

/// Removes control characters from untrusted text and truncates it.
fn printable(text: &str, max_chars: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(max_chars).collect()
}

/// Checks that a rule is usable, belongs to the issuer of the token and matches its claims. Returns what it grants.
fn evaluate(found: FoundRule, issuer: &IssuerRow, identity: &Identity) -> Result<Grant, Refusal> {
    let unusable = |reason: String| refusal("rule is unusable", reason);
    let rule = found.row.ok_or_else(|| unusable("the terms of the rule cannot be read".into()))?;
    check(&rule.terms).map_err(|error| unusable(error.to_string()))?;
    if rule.terms.issuer != issuer.name {
        let detail =
            format!("the issuer of the token is {}, that of the rule is {}", issuer.name, rule.terms.issuer);
        return Err(refusal("wrong issuer", detail));
    }
    let mut claims = Map::new();
    let mut wrong = Vec::new();
    for (name, matcher) in &rule.terms.bound_claims {
        match matched(matcher, identity.claims.get(name)) {
            Ok(text) => {
                claims.insert(name.clone(), text.into());
            }
            Err(reason) => wrong.push(format!("claim \"{name}\" {reason}")),
        }
    }
    if wrong.is_empty() {
        Ok(Grant { rule, claims })
    } else {
        Err(refusal("claims do not match", wrong.join(", ")))
    }
}

/// Rejects terms that the API would not accept: the row was modified by other means.
fn check(terms: &RuleTerms) -> Result<()> {
    check_bound_claims(&json!(terms.bound_claims))?;
    check_scopes(&json!(terms.scopes))?;
    check_key_ttl(&json!(terms.key_ttl))?;
    check_key_name_prefix(&json!(terms.key_name_prefix))?;
    Ok(())
}

/// Matches a claim. Only a whole string matches, never an element of a list.
fn matched<'a>(matcher: &ClaimMatcher, claim: Option<&'a Value>) -> Result<&'a str, &'static str> {
    let claim = claim.ok_or("is absent")?;
    let text = claim.as_str().ok_or("is not a string")?;
    let matches = match matcher {
        ClaimMatcher::Exact(wanted) => wanted == text,
        ClaimMatcher::AnyOf(wanted) => wanted.iter().any(|wanted| wanted == text),
    };
    if matches { Ok(text) } else { Err("has another value") }
}

/// Returns the provenance that is stored with a key.
fn provenance(grant: &Grant, identity: &Identity) -> Value {
    let subject = identity.claims.get("sub").and_then(Value::as_str);
    json!({
        "source": "federated",
        "rule": grant.rule.id.to_string(),
        "rule_name": grant.rule.name,
        "issuer": grant.rule.terms.issuer,
        "claims": grant.claims,
        "jti": identity.token_id,
        "sub": subject.map(|subject| printable(subject, MAX_DETAIL_CHARS)),
    })
}

#[cfg(test)]
mod tests;
