//! The exchange: a token of a trusted issuer for a key of a namespace, as a rule says.
//!
//! Whoever asks is a stranger, so everything is refused unless every step agrees, and the database is asked as little
//! as each step needs. The answer names the step and never the reason; the reason is told to the owner of the rule.

use std::fmt;

use muster_types::event::Event;
use muster_types::ids::{KeyId, RuleId};
use muster_types::key::{Secret, random_text};
use muster_types::namespace::NamespaceState;
use muster_types::object::{ObjectRef, ObjectType};
use muster_types::rule::{
    Matcher, RuleTerms, check_bound_claims, check_key_name_prefix, check_key_ttl, check_scopes,
};
use muster_types::time::now;
use muster_types::{Error, Result};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::auth::identity::{Identity, Refused, unverified_issuer};
use crate::objects::key::written;
use muster_store::issuers::IssuerRow;
use muster_store::keys::{NewKey, PutOutcome, StoredSecret};
use muster_store::rules::{FoundRule, RuleRow};
use muster_store::{StoreError, Tx, exchanges, issuers, keys, namespaces, rules, transaction};

/// Random characters at the end of a key's name.
const SUFFIX: usize = 8;
/// Names that are drawn before we give up; the second is hardly ever needed.
const DRAWS: usize = 8;
/// Characters of a stranger's text that are written down.
const LONGEST_TEXT: usize = 256;
/// Characters of what the owner of a rule is told.
const LONGEST_DETAIL: usize = 1024;

/// A request to exchange an identity token, not validated yet.
// `Debug` is implemented by hand, because the token is a credential.
#[derive(Default, serde::Deserialize, utoipa::ToSchema)]
#[schema(as = NewExchange)]
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

impl fmt::Debug for ExchangeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExchangeRequest(…)")
    }
}

/// Where a request comes from.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The address that it is counted for.
    pub source: &'a str,
    pub request_id: &'a str,
}

/// A key that was made.
#[derive(Debug)]
pub struct Minted {
    pub namespace: String,
    pub key_name: String,
    /// Nobody can show it again.
    pub key: Secret,
}

/// Exchanges a token for a key.
pub async fn create(app: &App, request: &ExchangeRequest, origin: Origin<'_>) -> Result<Minted> {
    let token = required("token", request.token.as_ref())?;
    let namespace = required("namespace", request.namespace.as_ref())?;
    let rule = required("rule", request.rule.as_ref())?;
    count(app, origin.source).await?;
    Attempt { app, token, namespace, rule, origin }.run().await
}

fn required<'a>(field: &str, value: Option<&'a Value>) -> Result<&'a str> {
    let text = value.and_then(Value::as_str).filter(|text| !text.is_empty());
    text.ok_or_else(|| Error::Invalid(format!("no {field} specified")))
}

/// Counts an attempt of an address, for the whole cluster, and refuses it if there were too many in this minute. It is
/// written down before anything else happens, so that what is refused later counts, too.
async fn count(app: &App, source: &str) -> Result<()> {
    let limit = app.settings.federation_rate_limit_per_minute;
    if limit <= 0 {
        return Ok(());
    }
    let (minute, retry_after) = minute_at(now());
    let too_many = || Error::TooMany { text: "too many federated exchange attempts".into(), retry_after };
    // Too many stay too many until the minute ends: a flood is not written down.
    if exchanges::attempts(&*app.store, source, minute).await? > limit {
        return Err(too_many());
    }
    let attempts = transaction!(app.store, |tx| { Ok(exchanges::count_attempt(tx, source, minute).await?) })?;
    if attempts <= limit {
        return Ok(());
    }
    if attempts == limit + 1 {
        tracing::warn!(source, limit, "too many federated exchange attempts in this minute");
    }
    Err(too_many())
}

/// The minute of a Unix time, since the epoch, and the seconds until it ends.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "Unix time is positive and small"
)]
fn minute_at(time: f64) -> (i64, u64) {
    let rest = 60.0 - time.rem_euclid(60.0);
    ((time / 60.0).floor() as i64, (rest.ceil() as u64).max(1))
}

/// Why an exchange is refused. The caller learns the reason, one of a few; the owner of the rule learns the detail.
#[derive(Debug, PartialEq, Eq)]
struct Refusal {
    reason: &'static str,
    detail: String,
}

fn refusal(reason: &'static str, detail: impl Into<String>) -> Refusal {
    Refusal { reason, detail: detail.into() }
}

/// What a rule gives for a token.
#[derive(Debug)]
struct Grant {
    rule: RuleRow,
    /// The claims that the rule asks for.
    claims: Map<String, Value>,
}

/// A key as it was written.
#[derive(Debug)]
struct Made {
    id: KeyId,
    name: String,
    expiry: f64,
    grant: Grant,
}

/// One attempt that was counted.
struct Attempt<'a> {
    app: &'a App,
    token: &'a str,
    namespace: &'a str,
    rule: &'a str,
    origin: Origin<'a>,
}

impl Attempt<'_> {
    async fn run(&self) -> Result<Minted> {
        let app = self.app;
        let issuer = self.issuer().await?;
        let identity = match app.identities.verify(&issuer, self.token, now()).await {
            Ok(identity) => identity,
            Err(Refused::Token(why)) => {
                let detail = format!("of issuer {}: {why}", issuer.name);
                return Err(self.refuse(None, &refusal("token rejected", detail)));
            }
            Err(Refused::Authorities(why)) => {
                tracing::warn!(source = self.origin.source, %why, "federated exchange is unavailable");
                let text = "federated exchange is unavailable, please retry";
                return Err(Error::Unavailable(text.into()));
            }
        };
        let Some(found) = rules::find(&*app.store, self.namespace, self.rule).await? else {
            return Err(self.refuse(None, &no_rule()));
        };
        let id = found.id;
        if let Err(refusal) = consider(found, &issuer, &identity) {
            return Err(self.refuse(Some(id), &refusal));
        }
        let namespace = namespaces::get(&*app.store, self.namespace).await?;
        if namespace.is_none_or(|row| row.state != NamespaceState::Created) {
            return Err(self.refuse(Some(id), &no_namespace()));
        }
        let key = Secret::generate();
        let sealed = app.secrets.seal(self.namespace, &key).await?;
        let made =
            transaction!(app.store, |tx| { Ok(self.make(tx, id, &issuer, &identity, &sealed).await?) })?;
        match made {
            Ok(made) => {
                self.tell(&made);
                Ok(Minted { namespace: self.namespace.to_owned(), key_name: made.name, key })
            }
            Err(refusal) => Err(self.refuse(Some(id), &refusal)),
        }
    }

    /// The trusted issuer that the token names. That the token is its work nobody knows yet.
    async fn issuer(&self) -> Result<IssuerRow> {
        let Some(url) = unverified_issuer(self.token) else {
            return Err(self.refuse(None, &refusal("untrusted issuer", "the token names no issuer")));
        };
        let row = issuers::by_url(&*self.app.store, &url).await?;
        // The row was found by a hash of the URL.
        row.filter(|row| row.terms.issuer_url == url).ok_or_else(|| {
            let detail = format!("the token is of {}", printable(&url, LONGEST_TEXT));
            self.refuse(None, &refusal("untrusted issuer", detail))
        })
    }

    /// Takes the token and makes the key, both or neither. Namespace, rule and issuer are looked at once more and stay
    /// as they are until it is done: from the moment that one of them is gone no key is made. A refusal has changed
    /// nothing.
    async fn make(
        &self,
        tx: &mut Tx,
        rule: RuleId,
        issuer: &IssuerRow,
        identity: &Identity,
        secret: &StoredSecret,
    ) -> Result<Result<Made, Refusal>, StoreError> {
        if !namespaces::lock(tx, self.namespace, NamespaceState::Created).await? {
            return Ok(Err(no_namespace()));
        }
        if !rules::lock(tx, rule).await? {
            return Ok(Err(no_rule()));
        }
        let found = rules::find(&mut *tx, self.namespace, self.rule).await?;
        let Some(found) = found.filter(|found| found.id == rule) else { return Ok(Err(no_rule())) };
        let grant = match consider(found, issuer, identity) {
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
        let url = &issuer.terms.issuer_url;
        if !exchanges::consume_token(tx, rule, url, &identity.token_id, identity.expires).await? {
            return Ok(Err(refusal("token already used", "the rule has taken this token before")));
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
        for _ in 0..DRAWS {
            let name = format!("{}-{}", terms.key_name_prefix, random_text(SUFFIX));
            match keys::insert(tx, self.namespace, &name, &new).await {
                Ok(id) => return Ok(Ok(Made { id, name, expiry, grant })),
                // Never the key of somebody else: another name is drawn.
                Err(StoreError::Duplicate(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::Conflict("no free name for a key was drawn".into()))
    }

    /// Records what was made, and by which right.
    fn tell(&self, made: &Made) {
        let rule = &made.grant.rule;
        let object = ObjectRef::new(ObjectType::NamespaceKey, made.id);
        self.record(
            written(PutOutcome::Created(made.id), self.namespace, &made.name).with("expiry", made.expiry),
        );
        let minted = |event: Event| {
            event
                .with("rule", rule.id.to_string())
                .with("rule_name", rule.name.clone())
                .with("issuer", rule.terms.issuer.clone())
                .with("claims", made.grant.claims.clone())
                .with("remote-address", self.origin.source)
        };
        let event = minted(Event::audit(object, "key minted by federated exchange"));
        self.record(event.with("scopes", json!(rule.terms.scopes)));
        let namespace = ObjectRef::namespace(self.namespace);
        let event = minted(Event::audit(namespace, "federated exchange minted a key"));
        self.record(event.with("key_name", made.name.clone()));
    }

    fn record(&self, mut event: Event) {
        event.request_id = Some(self.origin.request_id.to_owned());
        self.app.events.record(event);
    }

    /// Logs a refusal, tells the owner of the rule if it came so far, and makes the answer.
    fn refuse(&self, rule: Option<RuleId>, refusal: &Refusal) -> Error {
        let detail = printable(&refusal.detail, LONGEST_DETAIL);
        tracing::info!(
            source = self.origin.source,
            namespace = printable(self.namespace, LONGEST_TEXT),
            rule = printable(self.rule, LONGEST_TEXT),
            reason = refusal.reason,
            detail,
            "federated exchange refused"
        );
        if let Some(rule) = rule {
            let object = ObjectRef::new(ObjectType::Rule, rule);
            let mut event = Event::audit(object, "federated exchange refused")
                .with("reason", refusal.reason)
                .with("detail", detail)
                .with("remote-address", self.origin.source);
            event.request_id = Some(self.origin.request_id.to_owned());
            // Strangers can cause as many as they are allowed attempts.
            self.app.events.record_if_room(event);
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

/// A stranger's text as it may be written down.
fn printable(text: &str, longest: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(longest).collect()
}

/// What a rule gives for a token of an issuer, if it can be used, is for that issuer, and the token claims what it
/// asks for.
fn consider(found: FoundRule, issuer: &IssuerRow, identity: &Identity) -> Result<Grant, Refusal> {
    let unusable = |why: String| refusal("rule is unusable", why);
    let rule = found.row.ok_or_else(|| unusable("what the rule says cannot be read".into()))?;
    check(&rule.terms).map_err(|error| unusable(error.to_string()))?;
    if rule.terms.issuer != issuer.name {
        let detail = format!("the token is of issuer {}, the rule of {}", issuer.name, rule.terms.issuer);
        return Err(refusal("wrong issuer", detail));
    }
    let mut claims = Map::new();
    let mut wrong = Vec::new();
    for (name, matcher) in &rule.terms.bound_claims {
        match matched(matcher, identity.claims.get(name)) {
            Ok(text) => {
                claims.insert(name.clone(), text.into());
            }
            Err(why) => wrong.push(format!("claim \"{name}\" {why}")),
        }
    }
    if wrong.is_empty() {
        Ok(Grant { rule, claims })
    } else {
        Err(refusal("claims do not match", wrong.join(", ")))
    }
}

/// Refuses terms that no caller could have set: whoever wrote them meant something else.
fn check(terms: &RuleTerms) -> Result<()> {
    check_bound_claims(&json!(terms.bound_claims))?;
    check_scopes(&json!(terms.scopes))?;
    check_key_ttl(&json!(terms.key_ttl))?;
    check_key_name_prefix(&json!(terms.key_name_prefix))?;
    Ok(())
}

/// A claim that is as it must be, or what is wrong with it. Only a whole text can be right, never one of a list.
fn matched<'a>(matcher: &Matcher, claim: Option<&'a Value>) -> Result<&'a str, &'static str> {
    let claim = claim.ok_or("is absent")?;
    let text = claim.as_str().ok_or("is not a string")?;
    let fits = match matcher {
        Matcher::One(wanted) => wanted == text,
        Matcher::Any(wanted) => wanted.iter().any(|wanted| wanted == text),
    };
    if fits { Ok(text) } else { Err("has another value") }
}

/// Who made a key, as it is stored with it.
fn provenance(grant: &Grant, identity: &Identity) -> Value {
    let subject = identity.claims.get("sub").and_then(Value::as_str);
    json!({
        "source": "federated",
        "rule": grant.rule.id.to_string(),
        "rule_name": grant.rule.name,
        "issuer": grant.rule.terms.issuer,
        "claims": grant.claims,
        "jti": identity.token_id,
        "sub": subject.map(|subject| printable(subject, LONGEST_DETAIL)),
    })
}

#[cfg(test)]
mod tests {
    use muster_types::ids::IssuerId;
    use muster_types::issuer::{IssuerState, IssuerTerms};
    use muster_types::rule::RuleState;

    use super::*;

    fn issuer() -> IssuerRow {
        let terms = IssuerTerms {
            issuer_url: "https://forge.example".into(),
            jwks_uri: "https://forge.example/keys".into(),
            audience: "cloud".into(),
        };
        IssuerRow { id: IssuerId::new(), name: "forge".into(), state: IssuerState::Created, terms }
    }

    fn rule(bound_claims: &Value) -> RuleRow {
        let terms = RuleTerms {
            issuer: "forge".into(),
            bound_claims: check_bound_claims(bound_claims).unwrap(),
            scopes: vec!["artifact.*".into()],
            key_ttl: 600,
            key_name_prefix: "ci".into(),
        };
        let (id, state) = (RuleId::new(), RuleState::Created);
        RuleRow { id, namespace: "ns".into(), name: "deploy".into(), state, terms }
    }

    fn identity(claims: Value) -> Identity {
        let Value::Object(claims) = claims else { panic!("claims are an object") };
        Identity { claims, expires: now() + 60.0, token_id: "t".into() }
    }

    fn outcome(rule: RuleRow, claims: Value) -> Result<Map<String, Value>, Refusal> {
        let found = FoundRule { id: rule.id, row: Some(rule) };
        consider(found, &issuer(), &identity(claims)).map(|grant| grant.claims)
    }

    #[test]
    fn only_whole_texts_satisfy_a_claim() {
        let bound = json!({"sub": "repo:x", "ref": ["main", "next"]});
        for (claims, detail) in [
            (json!({"sub": "repo:x"}), "claim \"ref\" is absent"),
            (json!({"sub": "repo:x", "ref": null}), "claim \"ref\" is not a string"),
            (json!({"sub": "repo:x", "ref": ["main"]}), "claim \"ref\" is not a string"),
            (json!({"sub": "repo:x", "ref": 7}), "claim \"ref\" is not a string"),
            (json!({"sub": "repo:x", "ref": "mai"}), "claim \"ref\" has another value"),
            (json!({"sub": "repo:x", "ref": "Main"}), "claim \"ref\" has another value"),
            (json!({"sub": "repo:x ", "ref": "main"}), "claim \"sub\" has another value"),
            (json!({}), "claim \"ref\" is absent, claim \"sub\" is absent"),
        ] {
            let refused = outcome(rule(&bound), claims.clone()).unwrap_err();
            assert_eq!(refused, refusal("claims do not match", detail), "{claims}");
        }
        let claims = json!({"sub": "repo:x", "ref": "next", "aud": "cloud"});
        let granted = outcome(rule(&bound), claims).unwrap();
        assert_eq!(
            Value::Object(granted),
            json!({"sub": "repo:x", "ref": "next"}),
            "only what was asked for"
        );
    }

    #[test]
    fn a_rule_that_nobody_could_have_made_gives_nothing() {
        type Damage = fn(&mut RuleTerms);
        let damages: [Damage; 8] = [
            |terms| terms.bound_claims.clear(),
            |terms| terms.bound_claims.extend([("sub".to_owned(), Matcher::Any(vec![]))]),
            |terms| terms.bound_claims.extend([("sub".to_owned(), Matcher::One(String::new()))]),
            |terms| terms.scopes.clear(),
            |terms| terms.scopes.push(String::new()),
            |terms| terms.key_ttl = 0,
            |terms| terms.key_ttl = 86_401,
            |terms| terms.key_name_prefix = "_service_key".into(),
        ];
        for (at, damage) in damages.into_iter().enumerate() {
            let mut rule = rule(&json!({"sub": "x"}));
            damage(&mut rule.terms);
            let refused = outcome(rule, json!({"sub": "x"})).unwrap_err();
            assert_eq!(refused.reason, "rule is unusable", "damage {at}");
        }
        let unread = FoundRule { id: RuleId::new(), row: None };
        let refused = consider(unread, &issuer(), &identity(json!({"sub": "x"}))).unwrap_err();
        assert_eq!(refused.reason, "rule is unusable");
    }

    #[test]
    fn a_rule_takes_only_tokens_of_its_own_issuer() {
        let mut rule = rule(&json!({"sub": "x"}));
        rule.terms.issuer = "Forge".into();
        let refused = outcome(rule, json!({"sub": "another"})).unwrap_err();
        assert_eq!(refused.reason, "wrong issuer", "before the claims are looked at");
    }

    #[test]
    fn a_minute_ends_when_its_sixty_seconds_are_over() {
        for (time, expected) in
            [(0.0, (0, 60)), (59.0, (0, 1)), (59.999, (0, 1)), (60.0, (1, 60)), (61.5, (1, 59))]
        {
            assert_eq!(minute_at(time), expected, "{time}");
        }
    }

    #[test]
    fn fields_that_are_no_texts_are_not_there() {
        for value in [None, Some(json!(null)), Some(json!("")), Some(json!(7)), Some(json!(["x"]))] {
            let refused = required("token", value.as_ref()).unwrap_err();
            assert_eq!(refused.to_string(), "no token specified", "{value:?}");
        }
        assert_eq!(required("token", Some(&json!("x"))).unwrap(), "x");
    }

    #[test]
    fn what_strangers_write_does_not_break_the_log() {
        assert_eq!(printable("a\n\u{1b}[31mb\u{9b}c", 4), "a[31");
        let request = ExchangeRequest { token: Some(json!("secret")), ..ExchangeRequest::default() };
        assert!(!format!("{request:?}").contains("secret"));
    }

    #[test]
    fn a_key_remembers_where_it_is_from() {
        let rule = rule(&json!({"sub": "x"}));
        let claims = json!({"sub": "x", "email": "private", "jti": "t"});
        let found = FoundRule { id: rule.id, row: Some(rule.clone()) };
        let identity = identity(claims);
        let grant = consider(found, &issuer(), &identity).unwrap();
        let expected = json!({
            "source": "federated", "rule": rule.id.to_string(), "rule_name": "deploy", "issuer": "forge",
            "claims": {"sub": "x"}, "jti": "t", "sub": "x",
        });
        assert_eq!(provenance(&grant, &identity), expected);
    }
}
