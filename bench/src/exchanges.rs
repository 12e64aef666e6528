//! Benchmarks the exchange of identity tokens for keys. The baseline is the verification of the signature alone. The
//! issuer's key set is cached, as it usually is.

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
use crate::sampling::{LoadGenerator, ROUNDS, median, micros, process_cpu_time, progress};
use crate::server::Server;
use crate::table::{Row, Table};

/// Exchanges per algorithm and round, each with its own token.
const EXCHANGES: usize = 2000;
const AUDIENCE: &str = "cloud";
/// The lifetime of the tokens in seconds, longer than the benchmark takes.
const TOKEN_LIFETIME: u64 = 3600;

/// A signature algorithm.
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

    /// Returns a new token.
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

    /// Returns the parsed public key.
    fn public_key(self, issuer: &Issuer) -> anyhow::Result<ParsedPublicKey> {
        let jwk = match self {
            Self::Rs256 => issuer.rsa_jwk(),
            Self::Es256 => issuer.ec_jwk("ES256"),
        };
        let bytes =
            |name: &str| anyhow::Ok(BASE64.decode(jwk[name].as_str().context("missing member of the JWK")?)?);
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

/// The result of a series of actions.
#[derive(Debug, Clone, Copy)]
struct Throughput {
    /// Actions per second.
    rate: f64,
    /// Microseconds of CPU time per action.
    cost: f64,
}

impl Throughput {
    fn new(count: usize, elapsed: Duration, cpu: Duration) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a count of exchanges")]
        let rate = count as f64 / elapsed.as_secs_f64();
        Self { rate, cost: micros(cpu, count) }
    }

    fn row(label: &str, all: &[Self], baselines: &[Self]) -> Row {
        let rate = median(all.iter().map(|one| one.rate).collect());
        let cost = median(all.iter().map(|one| one.cost).collect());
        let multiples = all.iter().zip(baselines).map(|(one, baseline)| one.cost / baseline.cost).collect();
        Row::new(label, format!("{rate:.0} per second, {cost:.0} µs CPU")).multiple(median(multiples))
    }
}

/// Benchmarks exchanges with SQLite and 64 connections.
pub(crate) async fn measure(program: &Path, quick: bool, table: &mut Table) -> anyhow::Result<()> {
    table.section("identity token exchanges, SQLite");
    let directory = tempfile::tempdir()?;
    let issuer = Issuer::start();
    let authority = directory.path().join("authority.pem");
    issuer.write_ca(&authority);
    let settings = [
        ("MUSTER_FEDERATION_RATE_LIMIT_PER_MINUTE", "0".to_owned()),
        ("MUSTER_QUOTA_KEYS", "0".to_owned()),
        ("MUSTER_FEDERATION_JWKS_CA_BUNDLE", authority.display().to_string()),
        ("MUSTER_FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1/128".to_owned()),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value));
    let server = Server::start(program, &directory.path().join("data"), &settings).await?;
    let terms =
        IssuerTerms { issuer_url: issuer.url(), jwks_uri: issuer.jwks_uri(), audience: AUDIENCE.into() };
    prepare(&server, &terms).await?;
    let count = if quick { EXCHANGES / 10 } else { EXCHANGES };
    for algorithm in [Algorithm::Rs256, Algorithm::Es256] {
        let name = algorithm.name();
        let (mut signatures, mut tokens_verified, mut exchanges, mut undrained) =
            (vec![], vec![], vec![], vec![]);
        for round in 1..=ROUNDS {
            progress(&format!("exchanges with {name}, round {round} of {ROUNDS}"));
            let exp = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() + TOKEN_LIFETIME;
            let tokens: Vec<String> = (0..=count).map(|_| algorithm.sign(&issuer, exp)).collect();
            signatures.push(verify_signatures(algorithm, &issuer, &tokens)?);
            tokens_verified.push(verify_tokens(&issuer, &terms, &tokens)?);
            let (without_events, with_events) = exchange(&server, &tokens).await?;
            undrained.push(without_events);
            exchanges.push(with_events);
        }
        table.add(Throughput::row(
            &format!("{name} signature verification (baseline)"),
            &signatures,
            &signatures,
        ));
        table.add(Throughput::row("  token parsing and verification", &tokens_verified, &signatures));
        table.add(Throughput::row(&format!("POST /auth/federated, {name}"), &exchanges, &signatures));
        table.add(Throughput::row("  without draining events", &undrained, &signatures));
    }
    ensure!(issuer.fetches() < 10, "the key set was fetched {} times", issuer.fetches());
    server.stop().await
}

/// Creates the issuer and a rule for its tokens.
async fn prepare(server: &Server, terms: &IssuerTerms) -> anyhow::Result<()> {
    let token = server.token().await?;
    let mut new_issuer = json!(terms);
    new_issuer["name"] = "forge".into();
    let rule = json!({
        "name": "deploy", "issuer": "forge", "key_ttl": 600, "key_name_prefix": "robot", "scopes": ["artifact.*"],
        "bound_claims": { "repository": "acme/widgets", "ref": ["refs/heads/main", "refs/heads/next"] },
    });
    for (path, body) in [
        ("/auth/issuers", new_issuer),
        ("/auth/namespaces", json!({ "namespace": "ci" })),
        ("/auth/namespaces/ci/rules", rule),
    ] {
        load::call(server.address, &request("POST", path, Some(&token), Some(&body))).await?.ok()?;
    }
    Ok(())
}

/// Verifies only the signatures of tokens.
fn verify_signatures(algorithm: Algorithm, issuer: &Issuer, tokens: &[String]) -> anyhow::Result<Throughput> {
    let key = algorithm.public_key(issuer)?;
    let signed = |token: &String| {
        let (signed, signature) = token.rsplit_once('.').context("no signature")?;
        anyhow::Ok((signed.to_owned(), BASE64.decode(signature)?))
    };
    let signed: Vec<(String, Vec<u8>)> = tokens.iter().map(signed).collect::<Result<_, _>>()?;
    let (began, cpu) = (Instant::now(), process_cpu_time()?);
    for (signed, signature) in &signed {
        key.verify_sig(signed.as_bytes(), signature)?;
    }
    Ok(Throughput::new(signed.len(), began.elapsed(), process_cpu_time()? - cpu))
}

/// Parses and verifies tokens as the server does with a cached key set.
fn verify_tokens(issuer: &Issuer, terms: &IssuerTerms, tokens: &[String]) -> anyhow::Result<Throughput> {
    let keys = KeySet::parse(issuer.jwks().to_string().as_bytes()).map_err(anyhow::Error::msg)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    let (began, cpu) = (Instant::now(), process_cpu_time()?);
    for token in tokens {
        verify_with(&keys, terms, token, now).map_err(|error| anyhow::anyhow!("{error:?}"))?;
    }
    Ok(Throughput::new(tokens.len(), began.elapsed(), process_cpu_time()? - cpu))
}

/// Exchanges the tokens and returns the throughput without and with the cost of draining the events. The first token
/// only fills the cache of the key set.
async fn exchange(server: &Server, tokens: &[String]) -> anyhow::Result<(Throughput, Throughput)> {
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
    let mut load = LoadGenerator::new(server).await?;
    server.wait_until_drained().await?;
    let (began, cpu) = (Instant::now(), server.cpu()?);
    let cost = load.cost(count, move |number| Arc::clone(&rest[number])).await?;
    let elapsed = began.elapsed();
    server.wait_until_drained().await?;
    Ok((Throughput::new(count, elapsed, cost), Throughput::new(count, elapsed, server.cpu()? - cpu)))
}
