//! Verifies tokens with given keys, without network access.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use muster_testing::Issuer;
use muster_testing::issuer::Signer;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const NOW: f64 = 1_000_000.0;

/// Only its keys are used, not its server.
static ISSUER: LazyLock<Issuer> = LazyLock::new(Issuer::start);

fn terms() -> IssuerTerms {
    IssuerTerms {
        issuer_url: "https://issuer.example".into(),
        jwks_uri: "https://issuer.example/keys".into(),
        audience: "muster".into(),
    }
}

fn claims() -> Value {
    json!({"iss": "https://issuer.example", "aud": "muster", "exp": NOW + 1.0, "sub": "me", "jti": "1"})
}

fn with(mut object: Value, members: Value) -> Value {
    let Value::Object(members) = members else { panic!("not an object: {members}") };
    for (name, value) in members {
        object[name] = value;
    }
    object
}

fn without(mut object: Value, member: &str) -> Value {
    object.as_object_mut().unwrap().remove(member);
    object
}

fn key_set(keys: &[Value]) -> KeySet {
    KeySet::parse(json!({ "keys": keys }).to_string().as_bytes()).unwrap()
}

/// Returns a set with an RSA key and a key of each curve.
fn all_keys() -> KeySet {
    let rsa = with(ISSUER.rsa_jwk(), json!({"kid": "rsa"}));
    let curve = |name: &str| with(ISSUER.ec_jwk(name), json!({ "kid": name }));
    key_set(&[rsa, curve("ES256"), curve("ES384"), curve("ES512")])
}

fn verified(keys: &KeySet, token: &str) -> Result<Identity, String> {
    verify_with(keys, &terms(), token, NOW).map_err(|error| match error {
        IdentityError::Token(why) => why,
        IdentityError::CaBundle(why) => panic!("unexpected CA bundle error: {why}"),
    })
}

fn token(header: &Value, claims: &Value) -> String {
    ISSUER.token_with(header.clone(), claims.clone(), Signer::Rsa("RS256"))
}

fn header() -> Value {
    json!({"alg": "RS256", "kid": "rsa"})
}

/// Returns a token with any header and claims, signed by `OWN_KEY`.
fn sign_raw(header: &str, claims: &str) -> String {
    let (header, claims) = (BASE64.encode(header), BASE64.encode(claims));
    let signed = format!("{header}.{claims}");
    format!("{signed}.{}", BASE64.encode(sign(&signed)))
}

static OWN_KEY: LazyLock<aws_lc_rs::signature::EcdsaKeyPair> = LazyLock::new(|| {
    let algorithm = &aws_lc_rs::signature::ECDSA_P256_SHA256_FIXED_SIGNING;
    aws_lc_rs::signature::EcdsaKeyPair::generate(algorithm).unwrap()
});

fn sign(text: &str) -> Vec<u8> {
    OWN_KEY.sign(&aws_lc_rs::rand::SystemRandom::new(), text.as_bytes()).unwrap().as_ref().to_vec()
}

fn own_jwk() -> Value {
    use aws_lc_rs::signature::KeyPair as _;
    let point = OWN_KEY.public_key().as_ref();
    json!({"kty": "EC", "crv": "P-256", "kid": "own", "x": BASE64.encode(&point[1..33]), "y": BASE64.encode(&point[33..])})
}

#[test]
fn verifies_every_algorithm_with_a_matching_key() {
    let keys = all_keys();
    for algorithm in ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"] {
        let header = json!({"alg": algorithm, "kid": "rsa"});
        let token = ISSUER.token_with(header, claims(), Signer::Rsa(algorithm));
        let identity = verified(&keys, &token).unwrap();
        assert_eq!((identity.expires, identity.token_id.as_str()), (NOW + 1.0, "1"), "{algorithm}");
        assert_eq!(Value::Object(identity.claims), claims());
    }
    for algorithm in ["ES256", "ES384", "ES512"] {
        let header = json!({"alg": algorithm, "kid": algorithm});
        let token = ISSUER.token_with(header, claims(), Signer::Ec(algorithm));
        verified(&keys, &token).unwrap_or_else(|why| panic!("{algorithm}: {why}"));
    }
}

#[test]
fn verifies_the_example_of_rfc_7515() {
    let key = json!({
        "kty": "EC", "crv": "P-256",
        "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
    });
    let text = "eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvb\
                S9pc19yb290Ijp0cnVlfQ.DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP\
                3-Kg6NU1Q";
    assert_eq!(key_set(&[key]).verify(&Token::parse(text).unwrap()), Verdict::Signed);
    assert_eq!(unverified_issuer(text).as_deref(), Some("joe"));
}

#[test]
fn rejects_signature_of_another_algorithm() {
    let keys = all_keys();
    for (named, used) in [("RS256", "PS256"), ("PS256", "RS256"), ("RS256", "RS384"), ("PS384", "PS512")] {
        let header = json!({"alg": named, "kid": "rsa"});
        let token = ISSUER.token_with(header, claims(), Signer::Rsa(used));
        assert_eq!(verified(&keys, &token).unwrap_err(), "token signature is invalid");
    }
    for (named, id) in [("ES256", "rsa"), ("RS256", "ES256"), ("ES256", "ES384"), ("ES512", "ES256")] {
        let header = json!({"alg": named, "kid": id});
        let token = ISSUER.token_with(header, claims(), Signer::Ec("ES256"));
        assert_eq!(verified(&keys, &token).unwrap_err(), "token algorithm does not match its key");
    }
}

#[test]
fn rejects_shared_secrets_and_missing_signatures() {
    let keys = all_keys();
    for word in ["none", "None", "NONE", "", "HS256", "HS384", "HS512", "EdDSA", "ES256K", "rs256", "RS1"] {
        for secret in ISSUER.public_key_texts() {
            let header = json!({"alg": word, "kid": "rsa"});
            for signer in [Signer::Hmac(secret), Signer::None, Signer::Rsa("RS256")] {
                let token = ISSUER.token_with(header.clone(), claims(), signer);
                assert_eq!(verified(&keys, &token).unwrap_err(), "token algorithm is not allowed", "{word}");
            }
        }
    }
    for signer in [Signer::None, Signer::Hmac(b"secret".to_vec())] {
        let token = ISSUER.token_with(header(), claims(), signer);
        assert_eq!(verified(&keys, &token).unwrap_err(), "token signature is invalid");
    }
}

#[test]
fn ignores_keys_in_the_header() {
    let mine = with(own_jwk(), json!({"kid": "rsa"}));
    for members in [
        json!({"jwk": mine}),
        json!({"jku": "https://evil.example/keys"}),
        json!({"x5u": "https://evil.example/chain"}),
        json!({"x5c": ["MIIB"]}),
        json!({"jwk": 7, "jku": null, "x5u": [], "x5c": {}}),
    ] {
        let good = token(&with(header(), members.clone()), &claims());
        verified(&all_keys(), &good).unwrap();
        let forged = with(json!({"alg": "ES256", "kid": "rsa"}), members.clone());
        assert!(
            verified(&all_keys(), &sign_raw(&forged.to_string(), &claims().to_string())).is_err(),
            "{members}"
        );
    }
}

#[test]
fn rejects_critical_header_parameters() {
    for members in [
        json!({"crit": ["exp"]}),
        json!({"crit": []}),
        json!({"crit": null}),
        json!({"crit": ["b64"], "b64": false}),
        json!({"b64": false}),
        json!({"b64": "no"}),
    ] {
        let token = token(&with(header(), members), &claims());
        assert_eq!(verified(&all_keys(), &token).unwrap_err(), "token requires an unsupported extension");
    }
    verified(&all_keys(), &token(&with(header(), json!({"b64": true, "typ": 7})), &claims())).unwrap();
}

#[test]
fn token_without_key_id_requires_exactly_one_matching_key() {
    let token = token(&json!({"alg": "RS256"}), &claims());
    verified(&all_keys(), &token).unwrap();
    let rsa = ISSUER.rsa_jwk();
    verified(&key_set(std::slice::from_ref(&rsa)), &token).unwrap();
    let two = key_set(&[rsa.clone(), with(rsa, json!({"kid": "again"}))]);
    assert_eq!(verified(&two, &token).unwrap_err(), "token has no key ID and several keys match");
    assert_eq!(verified(&key_set(&[]), &token).unwrap_err(), "issuer has no such key");
    assert_eq!(verified(&key_set(&[own_jwk()]), &token).unwrap_err(), "issuer has no such key");
}

#[test]
fn key_id_must_match_exactly() {
    let keys = all_keys();
    for id in [json!("rsa2"), json!("RSA"), json!(""), json!("rsa "), json!("../rsa")] {
        let token = token(&with(header(), json!({"kid": id})), &claims());
        assert_eq!(verified(&keys, &token).unwrap_err(), "issuer has no such key", "{id}");
    }
    for id in [json!(1), json!(null), json!(["rsa"]), json!({"rsa": 1})] {
        let token = token(&with(header(), json!({"kid": id})), &claims());
        assert_eq!(verified(&keys, &token).unwrap_err(), "token key ID is not a string", "{id}");
    }
    // A key without an ID does not match every ID.
    assert!(verified(&key_set(&[ISSUER.rsa_jwk()]), &token(&header(), &claims())).is_err());
}

#[test]
fn tries_all_keys_with_the_same_id() {
    let other = with(own_jwk(), json!({"kid": "rsa"}));
    let old = with(Issuer::start().rsa_jwk(), json!({"kid": "rsa"}));
    let right = with(ISSUER.rsa_jwk(), json!({"kid": "rsa"}));
    verified(&key_set(&[other.clone(), old.clone(), right]), &token(&header(), &claims())).unwrap();
    let why = verified(&key_set(&[other, old]), &token(&header(), &claims())).unwrap_err();
    assert_eq!(why, "token signature is invalid");
}

#[test]
fn ignores_keys_for_other_purposes() {
    let rsa = with(ISSUER.rsa_jwk(), json!({"kid": "rsa"}));
    let token = token(&header(), &claims());
    for (members, is_used) in [
        (json!({}), true),
        (json!({"use": "sig", "alg": "RS256", "key_ops": ["verify"]}), true),
        (json!({"key_ops": ["sign", "verify"], "x5c": ["MIIB"], "more": 1}), true),
        (json!({"use": "enc"}), false),
        (json!({"use": null}), false),
        (json!({"use": ["sig"]}), false),
        (json!({"key_ops": []}), false),
        (json!({"key_ops": ["encrypt"]}), false),
        (json!({"key_ops": "verify"}), false),
        (json!({"alg": "RS384"}), false),
        (json!({"alg": "PS256"}), false),
        (json!({"alg": "HS256"}), false),
        (json!({"alg": "RSA-OAEP"}), false),
        (json!({"alg": null}), false),
        (json!({"kid": 7}), false),
        (json!({"kid": null}), false),
        (json!({"kty": "rsa"}), false),
        (json!({"kty": "oct"}), false),
    ] {
        let keys = key_set(&[with(rsa.clone(), members.clone())]);
        assert_eq!(verified(&keys, &token).is_ok(), is_used, "{members}");
    }
}

#[test]
fn skips_unsupported_members_of_a_set() {
    let rsa = with(ISSUER.rsa_jwk(), json!({"kid": "rsa"}));
    let odd = [
        json!(null),
        json!(7),
        json!([]),
        json!({}),
        json!({"kty": "oct", "kid": "rsa", "k": "c2VjcmV0", "alg": "HS256"}),
        json!({"kty": "OKP", "crv": "Ed25519", "kid": "rsa", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}),
        json!({"kty": "EC", "crv": "secp256k1", "kid": "rsa", "x": "AA", "y": "AA"}),
    ];
    let keys = key_set(&[&odd[..], &[rsa]].concat());
    assert_eq!(keys.count(), 1);
    verified(&keys, &token(&header(), &claims())).unwrap();
    for (body, why) in [
        ("", "key set is not valid JSON"),
        ("<html>", "key set is not valid JSON"),
        ("{\"keys\": [}", "key set is not valid JSON"),
        ("[]", "key set has no array \"keys\""),
        ("{}", "key set has no array \"keys\""),
        (r#"{"keys": {}}"#, "key set has no array \"keys\""),
    ] {
        assert_eq!(KeySet::parse(body.as_bytes()).unwrap_err(), why);
    }
    assert!(KeySet::parse("[".repeat(100_000).as_bytes()).is_err());
    let many = json!({"keys": vec![json!({}); 101]}).to_string();
    assert_eq!(KeySet::parse(many.as_bytes()).unwrap_err(), "key set has too many keys");
}

#[test]
fn skips_weak_and_malformed_keys() {
    let rsa = ISSUER.rsa_jwk();
    let n = BASE64.decode(rsa["n"].as_str().unwrap()).unwrap();
    let number = |bytes: &[u8]| json!(BASE64.encode(bytes));
    let (mut long, mut even) = (vec![1; 1025], n.clone());
    long[1024] = 1;
    even[n.len() - 1] &= 0xfe;
    for members in [
        json!({"n": number(&n[..128])}),
        json!({"n": number(&n[1..])}),
        json!({"n": number(&long)}),
        json!({"n": number(&even)}),
        json!({"n": ""}),
        json!({"n": "not base64!"}),
        json!({"n": 7}),
        json!({"e": ""}),
        json!({"e": number(&[0])}),
        json!({"e": number(&[1])}),
        json!({"e": number(&[2])}),
        json!({"e": number(&[1, 0, 0])}),
        json!({"e": number(&[1, 0, 0, 0, 1])}),
    ] {
        assert_eq!(key_set(&[with(rsa.clone(), members.clone())]).count(), 0, "{members}");
    }
    let padded = [&[0], n.as_slice()].concat();
    assert_eq!(key_set(&[with(rsa, json!({"n": number(&padded)}))]).count(), 1);

    let curve = own_jwk();
    for members in [
        json!({"crv": "P-384"}),
        json!({"crv": null}),
        json!({"x": curve["y"]}),
        json!({"x": "AA"}),
        json!({"y": number(&[0; 32])}),
        json!({"x": number(&[0; 32]), "y": number(&[0; 32])}),
        json!({"x": number(&[255; 32])}),
    ] {
        assert_eq!(key_set(&[with(curve.clone(), members.clone())]).count(), 0, "{members}");
    }
}

#[test]
fn issuer_must_match_exactly() {
    for issuer in [
        json!("https://issuer.example/"),
        json!("https://ISSUER.example"),
        json!("https://issuer.example "),
        json!(["https://issuer.example"]),
        json!(null),
    ] {
        let token = token(&header(), &with(claims(), json!({ "iss": issuer })));
        assert_eq!(verified(&all_keys(), &token).unwrap_err(), "token issuer does not match");
    }
    let token = token(&header(), &without(claims(), "iss"));
    assert_eq!(verified(&all_keys(), &token).unwrap_err(), "token issuer does not match");
    assert_eq!(unverified_issuer(&token), None);
}

#[test]
fn audience_must_include_the_expected_one() {
    for (audience, is_expected) in [
        (json!("muster"), true),
        (json!(["muster"]), true),
        (json!(["other", "muster"]), true),
        (json!("other"), false),
        (json!("muster2"), false),
        (json!("Muster"), false),
        (json!("other muster"), false),
        (json!(["other"]), false),
        (json!([]), false),
        (json!(["muster", 7]), false),
        (json!([["muster"]]), false),
        (json!({"muster": true}), false),
        (json!(null), false),
    ] {
        let token = token(&header(), &with(claims(), json!({"aud": audience})));
        let why = verified(&all_keys(), &token).err();
        assert_eq!(why, (!is_expected).then(|| "token audience does not match".to_owned()), "{audience}");
    }
    let token = token(&header(), &without(claims(), "aud"));
    assert_eq!(verified(&all_keys(), &token).unwrap_err(), "token audience does not match");
}

#[test]
fn token_is_valid_only_within_its_validity_period() {
    for (members, why) in [
        (json!({"exp": NOW}), Some("token has expired")),
        (json!({"exp": NOW - 0.001}), Some("token has expired")),
        (json!({"exp": NOW + 0.001}), None),
        (json!({"exp": 1_000_001}), None),
        (json!({"exp": -1}), Some("token has expired")),
        (json!({"exp": 1e300}), None),
        (json!({"exp": u64::MAX}), None),
        (json!({"exp": "1000001"}), Some("token has no valid exp claim")),
        (json!({"exp": null}), Some("token has no valid exp claim")),
        (json!({"exp": [1_000_001]}), Some("token has no valid exp claim")),
        (json!({"exp": true}), Some("token has no valid exp claim")),
        (json!({"nbf": NOW}), None),
        (json!({"nbf": NOW + 0.001}), Some("token is not valid yet")),
        (json!({"nbf": "0"}), Some("token has an invalid nbf claim")),
        (json!({"nbf": null}), Some("token has an invalid nbf claim")),
        (json!({"iat": NOW + 1e6}), None),
        (json!({"iat": "never"}), None),
    ] {
        let token = token(&header(), &with(claims(), members.clone()));
        assert_eq!(verified(&all_keys(), &token).err().as_deref(), why, "{members}");
    }
    let token = token(&header(), &without(claims(), "exp"));
    assert_eq!(verified(&all_keys(), &token).unwrap_err(), "token has no valid exp claim");
    for exp in ["1e999", "NaN", "Infinity"] {
        let claims = claims().to_string().replace("1000001.0", exp);
        assert!(claims.contains(exp));
        let token = sign_raw(r#"{"alg":"ES256","kid":"own"}"#, &claims);
        assert_eq!(verified(&key_set(&[own_jwk()]), &token).unwrap_err(), "token claims are malformed");
    }
}

#[test]
fn rejects_every_token_at_a_non_finite_time() {
    let token = token(&header(), &with(claims(), json!({"nbf": 0})));
    for now in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert!(verify_with(&all_keys(), &terms(), &token, now).is_err(), "{now}");
    }
}

#[test]
fn rejects_duplicate_members() {
    let keys = key_set(&[own_jwk()]);
    let (good_header, good_claims) = (r#"{"alg":"ES256","kid":"own"}"#, claims().to_string());
    verified(&keys, &sign_raw(good_header, &good_claims)).unwrap();
    for header in [
        r#"{"alg":"ES256","alg":"ES256","kid":"own"}"#,
        r#"{"alg":"none","alg":"ES256","kid":"own"}"#,
        r#"{"alg":"ES256","kid":"own","\u006bid":"own"}"#,
    ] {
        assert_eq!(
            verified(&keys, &sign_raw(header, &good_claims)).unwrap_err(),
            "token header is malformed"
        );
    }
    let twice = good_claims.replacen('{', r#"{"iss":"https://issuer.example","#, 1);
    let token = sign_raw(good_header, &twice);
    assert_eq!(verified(&keys, &token).unwrap_err(), "token claims are malformed");
    assert_eq!(unverified_issuer(&token), None);
}

#[test]
fn accepts_only_the_canonical_encoding() {
    let good = token(&header(), &claims());
    let keys = all_keys();
    verified(&keys, &good).unwrap();
    let parts: Vec<&str> = good.split('.').collect();
    let [header, claims, signature] = parts[..] else { panic!("{good}") };
    for text in [
        String::new(),
        ".".into(),
        "..".into(),
        "...".into(),
        format!("{header}.{claims}"),
        format!("{header}.{claims}."),
        format!("{good}."),
        format!(".{good}"),
        format!("{good}.{signature}"),
        format!("{good}="),
        format!("{good}=="),
        format!(" {good}"),
        format!("{good}\n"),
        format!("{header}.{claims}.{}\n{}", &signature[..10], &signature[10..]),
        format!("{header} .{claims}.{signature}"),
        format!("{header}==.{claims}.{signature}"),
        good.replace('.', ".."),
        format!("{good}A"),
        format!("{good}\u{e9}"),
        format!("{header}.{claims}.{}", signature.replace(['-', '_'], "+")),
        format!("Bearer {good}"),
    ] {
        assert!(verified(&keys, &text).is_err(), "{text}");
    }
    // Bits after the last byte must be zero.
    let last = signature.chars().last().unwrap();
    for other in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_".chars() {
        let text = format!("{}{other}", &good[..good.len() - 1]);
        assert_eq!(verified(&keys, &text).is_ok(), other == last);
    }
}

#[test]
fn rejects_parts_that_are_not_objects() {
    let keys = key_set(&[own_jwk()]);
    let (header, claims) = (r#"{"alg":"ES256","kid":"own"}"#, claims().to_string());
    for text in ["", "null", "7", "[]", "\"x\"", "{", "{}x", "{} {}", "\u{feff}{}", "{\"a\":\"\u{1}\"}"] {
        assert!(verified(&keys, &sign_raw(text, &claims)).is_err(), "{text}");
        assert!(verified(&keys, &sign_raw(header, text)).is_err(), "{text}");
    }
    let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(verified(&keys, &sign_raw(header, &deep)).unwrap_err(), "token claims are malformed");
    assert_eq!(verified(&keys, &sign_raw(&deep, &claims)).unwrap_err(), "token header is malformed");
}

#[test]
fn token_id_is_the_jti_or_a_hash_of_the_signed_part() {
    let keys = all_keys();
    for (jti, is_own) in [
        (json!("a"), true),
        (json!("é".repeat(128)), true),
        (json!("é".repeat(129)), false),
        (json!(""), false),
        (json!(7), false),
        (json!(null), false),
        (json!(["a"]), false),
    ] {
        let token = token(&header(), &with(claims(), json!({ "jti": jti })));
        let id = verified(&keys, &token).unwrap().token_id;
        if is_own {
            assert_eq!(json!(id), jti);
        } else {
            let signed = token.rsplit_once('.').unwrap().0;
            let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, signed.as_bytes());
            let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(id, format!("sha256:{hex}"));
        }
    }
}

static KEYS: LazyLock<KeySet> = LazyLock::new(all_keys);

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rejects_arbitrary_input(text in any::<String>(), bytes in any::<Vec<u8>>()) {
        prop_assert!(verified(&KEYS, &text).is_err());
        let lossy = String::from_utf8_lossy(&bytes);
        prop_assert!(verified(&KEYS, &lossy).is_err());
        let parts = format!("{}.{}.{}", BASE64.encode(&bytes), BASE64.encode(&text), BASE64.encode(&bytes));
        prop_assert!(verified(&KEYS, &parts).is_err());
        let _ = KeySet::parse(&bytes);
        let _ = unverified_issuer(&parts);
    }

    #[test]
    fn rejects_changed_token(at in any::<prop::sample::Index>(), to in any::<char>(), more in any::<bool>()) {
        static GOOD: LazyLock<Vec<char>> = LazyLock::new(|| token(&header(), &claims()).chars().collect());
        let mut changed = GOOD.clone();
        let at = at.index(changed.len());
        prop_assume!(changed[at] != to);
        if more { changed.insert(at, to) } else { changed[at] = to }
        let changed: String = changed.into_iter().collect();
        prop_assert!(verified(&KEYS, &changed).is_err(), "{changed}");
    }
}
