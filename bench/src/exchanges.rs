//! What it costs to exchange an identity token for a key, as a multiple of checking its signature and nothing else. The
//! issuer's keys are at hand, as they are but once in a while.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use muster_control::auth::identity::{KeySet, verify_with};
use muster_testing::Issuer;
use muster_testing::issuer::Signer;
use muster_types::issuer::IssuerTerms;
use serde_json::{Value, json};

use crate::load::{self, request};
use crate::server::Server;
use crate::table::{Row, Table};
use crate::{Caller, ROUNDS, median, micros, processor_time, progress};

/// Exchanges of each algorithm in a round; each has a token of its own.
const EXCHANGES: usize = 2000;
const AUDIENCE: &str = "cloud";
/// Seconds that the tokens are good for: longer than all of this takes.
const LIFE: u64 = 3600;

/// How tokens are signed.
#[derive(Debug, Clone, Copy)]
enum Algorithm {
    Rs256,
    Es256,
}

impl Algorithm {
    fn name(self) -> &'static str {
        match self {
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
        }
    }

    /// A token that no other one is like.
    fn sign(self, issuer: &Issuer, exp: u64) -> String {
        let mut claims = issuer.claims(AUDIENCE);
        claims["exp"] = exp.into();
        claims["repository"] = "acme/widgets".into();
        claims["ref"] = "refs/heads/main".into();
        let header = |kid: &str| json!({ "alg": self.name(), "typ": "JWT", "kid": kid });
        match self {
            Self::Rs256 => issuer.token_with(header("rsa-1"), claims, Signer::Rsa("RS256")),
            Self::Es256 => issuer.token_with(header("ec-1"), claims, Signer::Ec("ES256")),
        }
    }

    /// The public key, ready for checking.
    fn key(self, issuer: &Issuer) -> anyhow::Result<ParsedPublicKey> {
        let member = match self {
            Self::Rs256 => issuer.rsa_jwk(),
            Self::Es256 => issuer.ec_jwk("ES256"),
        };
        let bytes = |name: &str| anyhow::Ok(BASE64.decode(member[name].as_str().context("no such member")?)?);
        Ok(match self {
            Self::Rs256 => RsaPublicKeyComponents { n: bytes("n")?, e: bytes("e")? }
                .to_parsed_public_key(&RSA_PKCS1_2048_8192_SHA256)?,
            Self::Es256 => {
                let point = [vec![4], bytes("x")?, bytes("y")?].concat();
                ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point)?
            }
        })
    }
}

/// How fast something was done, one after the other or at once, and what one of it cost.
#[derive(Debug, Clone, Copy)]
struct Pace {
    rate: f64,
    cost: f64,
}

impl Pace {
    fn new(count: usize, took: Duration, cpu: Duration) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a count of exchanges")]
        let rate = count as f64 / took.as_secs_f64();
        Self { rate, cost: micros(cpu, count) }
    }

    fn row(what: &str, all: &[Self], floors: &[Self]) -> Row {
        let rate = median(all.iter().map(|pace| pace.rate).collect());
        let cost = median(all.iter().map(|pace| pace.cost).collect());
        let times = all.iter().zip(floors).map(|(pace, floor)| pace.cost / floor.cost).collect();
        Row::new(what, format!("{rate:.0} per second, {cost:.0} µs CPU")).times(median(times))
    }
}

/// Exchanges with SQLite, by 64 connections at a time.
pub(crate) async fn measure(program: &Path, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    table.section("exchanges, SQLite");
    let folder = tempfile::tempdir()?;
    let issuer = Issuer::start();
    let authority = folder.path().join("authority.pem");
    issuer.write_ca(&authority);
    let settings = [
        ("MUSTER_FEDERATION_RATE_LIMIT_PER_MINUTE", "0".to_owned()),
        ("MUSTER_FEDERATION_JWKS_CA_BUNDLE", authority.display().to_string()),
        ("MUSTER_FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1/128".to_owned()),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value));
    let server = Server::start(program, &folder.path().join("data"), &settings).await?;
    let terms =
        IssuerTerms { issuer_url: issuer.url(), jwks_uri: issuer.jwks_uri(), audience: AUDIENCE.into() };
    prepare(&server, &terms).await?;
    let count = if quick { EXCHANGES / 10 } else { EXCHANGES };
    for algorithm in [Algorithm::Rs256, Algorithm::Es256] {
        let name = algorithm.name();
        let (mut bare, mut whole, mut exchanged, mut answered) = (vec![], vec![], vec![], vec![]);
        for round in 1..=ROUNDS {
            progress(&format!("exchanges by {name}, round {round} of {ROUNDS}"));
            let exp = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() + LIFE;
            let tokens: Vec<String> = (0..=count).map(|_| algorithm.sign(&issuer, exp)).collect();
            bare.push(check_signatures(algorithm, &issuer, &tokens)?);
            whole.push(verify_tokens(&issuer, &terms, &tokens)?);
            let (pace, with_events) = exchange(&server, &tokens).await?;
            answered.push(pace);
            exchanged.push(with_events);
        }
        table.add(Pace::row(&format!("{name} signature checked in this process"), &bare, &bare));
        table.add(Pace::row("  token read and verified in this process", &whole, &bare));
        table.add(Pace::row(&format!("POST /auth/federated, {name}"), &exchanged, &bare));
        table.add(Pace::row("  before its events are drained", &answered, &bare));
    }
    ensure!(issuer.fetches() < 10, "the keys were fetched {} times", issuer.fetches());
    server.stop().await
}

/// Makes the issuer known, and a rule for its tokens.
async fn prepare(server: &Server, terms: &IssuerTerms) -> anyhow::Result<()> {
    let token = server.token().await?;
    let mut trusted = json!(terms);
    trusted["name"] = "forge".into();
    let rule = json!({
        "name": "deploy", "issuer": "forge", "key_ttl": 600, "key_name_prefix": "robot", "scopes": ["artifact.*"],
        "bound_claims": { "repository": "acme/widgets", "ref": ["refs/heads/main", "refs/heads/next"] },
    });
    for (path, body) in [
        ("/auth/issuers", trusted),
        ("/auth/namespaces", json!({ "namespace": "ci" })),
        ("/auth/namespaces/ci/rules", rule),
    ] {
        load::call(server.address, &request("POST", path, Some(&token), Some(&body))).await?.ok()?;
    }
    Ok(())
}

/// Checks signatures, and does nothing else that a token needs.
fn check_signatures(algorithm: Algorithm, issuer: &Issuer, tokens: &[String]) -> anyhow::Result<Pace> {
    let key = algorithm.key(issuer)?;
    let signed = |token: &String| {
        let (signed, signature) = token.rsplit_once('.').context("no signature")?;
        anyhow::Ok((signed.to_owned(), BASE64.decode(signature)?))
    };
    let signed: Vec<(String, Vec<u8>)> = tokens.iter().map(signed).collect::<Result<_, _>>()?;
    let (began, cpu) = (Instant::now(), processor_time()?);
    for (signed, signature) in &signed {
        key.verify_sig(signed.as_bytes(), signature)?;
    }
    Ok(Pace::new(signed.len(), began.elapsed(), processor_time()? - cpu))
}

/// Reads and verifies tokens as the server does it, with the keys at hand.
fn verify_tokens(issuer: &Issuer, terms: &IssuerTerms, tokens: &[String]) -> anyhow::Result<Pace> {
    let keys = KeySet::read(issuer.jwks().to_string().as_bytes()).map_err(anyhow::Error::msg)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    let (began, cpu) = (Instant::now(), processor_time()?);
    for token in tokens {
        verify_with(&keys, terms, token, now).map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
    }
    Ok(Pace::new(tokens.len(), began.elapsed(), processor_time()? - cpu))
}

/// Exchanges the tokens, the first of them only so that the keys are at hand. The second pace has what the events cost.
async fn exchange(server: &Server, tokens: &[String]) -> anyhow::Result<(Pace, Pace)> {
    let requests: Vec<Arc<[u8]>> = tokens
        .iter()
        .map(|token| {
            let body: Value = json!({ "token": token, "namespace": "ci", "rule": "deploy" });
            request("POST", "/auth/federated", None, Some(&body))
        })
        .collect();
    let (first, rest) = requests.split_first().context("no tokens")?;
    load::call(server.address, first).await?.ok()?;
    let (count, rest) = (rest.len(), rest.to_vec());
    let mut caller = Caller::new(server).await?;
    server.drained().await?;
    let (began, cpu) = (Instant::now(), server.cpu()?);
    let answering = caller.cost(count, move |number| Arc::clone(&rest[number])).await?;
    let took = began.elapsed();
    server.drained().await?;
    Ok((Pace::new(count, took, answering), Pace::new(count, took, server.cpu()? - cpu)))
}
