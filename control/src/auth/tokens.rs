//! Access tokens: HS256 JWTs whose subject is a list, `[namespace, key name]`.

use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use muster_types::key::Secret;
use serde::{Deserialize, Serialize};

/// The maximum length of a token.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// The number of seconds by which a token of a service key is valid before it is created, because the clock of the daemon that
/// verifies it may be behind.
const SERVICE_TOKEN_LEEWAY: u64 = 60;

/// The claims of a token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Claims {
    pub fresh: bool,
    pub iat: u64,
    pub nbf: u64,
    pub exp: u64,
    pub jti: String,
    #[serde(rename = "type")]
    pub kind: String,
    /// Namespace, then key name.
    pub sub: (String, String),
    pub iss: String,
    /// The key's nonce when the token was created.
    #[serde(default)]
    pub nonce: Option<String>,
    /// The scopes of the token; absent means everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scopes: Option<Vec<String>>,
    /// Only in tokens of service keys: the caller whose request a daemon has forwarded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller: Option<OriginalCaller>,
    /// Whether the token is that of a browser session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub session: bool,
}

/// The caller of a forwarded request. See docs/decisions/0043.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OriginalCaller {
    pub namespace: String,
    pub key_name: String,
    /// `None` is everything.
    pub scopes: Option<Vec<String>>,
    pub remote: String,
    /// The nonce of the caller's key; `None` from daemons of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nonce: Option<String>,
    /// Unix time at which the browser session of the caller ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_end: Option<u64>,
}

/// The key that a token is created for.
#[derive(Debug, Clone, Copy)]
pub struct TokenSubject<'a> {
    pub namespace: &'a str,
    pub key: &'a str,
    pub nonce: &'a str,
    pub scopes: Option<&'a [String]>,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
}

/// Why a token is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenError {
    /// The token is malformed, not signed by this cluster, or not valid yet.
    Invalid,
    Expired,
}

/// Signs and verifies access tokens.
#[derive(Debug)]
pub struct AccessTokens {
    key: hmac::Key,
    header: String,
    issuer: String,
    /// The lifetime of a token in seconds.
    lifetime: u64,
}

impl AccessTokens {
    #[must_use]
    pub fn new(seed: &Secret, issuer: &str, minutes: u64) -> Self {
        Self {
            key: hmac::Key::new(hmac::HMAC_SHA256, seed.expose().as_bytes()),
            header: BASE64.encode(r#"{"alg":"HS256","typ":"JWT"}"#),
            issuer: issuer.to_owned(),
            lifetime: minutes.saturating_mul(60),
        }
    }

    #[must_use]
    pub fn lifetime(&self) -> u64 {
        self.lifetime
    }

    /// Creates a token for a key. A key without scopes may do everything.
    #[must_use]
    pub fn create(
        &self,
        now: u64,
        namespace: &str,
        key: &str,
        nonce: &str,
        scopes: Option<&[String]>,
    ) -> String {
        self.sign(
            (now, now.saturating_add(self.lifetime)),
            TokenSubject { namespace, key, nonce, scopes },
            None,
            false,
        )
    }

    /// Creates a token for a browser session that ends at the Unix time `end`.
    #[must_use]
    pub fn create_session(&self, now: u64, end: u64, subject: TokenSubject<'_>) -> String {
        // The next request may go to another daemon, whose clock may be behind.
        self.sign((now.saturating_sub(SERVICE_TOKEN_LEEWAY), end), subject, None, true)
    }

    /// Creates a token for a service key that is valid for `lifetime` seconds. It acts for `caller` if there is one.
    #[must_use]
    pub fn create_service(
        &self,
        now: u64,
        lifetime: u64,
        subject: TokenSubject<'_>,
        caller: Option<OriginalCaller>,
    ) -> String {
        // Another daemon verifies it immediately, and its clock may be behind.
        self.sign(
            (now.saturating_sub(SERVICE_TOKEN_LEEWAY), now.saturating_add(lifetime)),
            subject,
            caller,
            false,
        )
    }

    /// Creates a token that is valid from the first of two times until the second.
    fn sign(
        &self,
        (start, end): (u64, u64),
        subject: TokenSubject<'_>,
        caller: Option<OriginalCaller>,
        session: bool,
    ) -> String {
        let claims = Claims {
            fresh: false,
            iat: start,
            nbf: start,
            exp: end,
            jti: uuid::Uuid::new_v4().to_string(),
            kind: "access".into(),
            sub: (subject.namespace.to_owned(), subject.key.to_owned()),
            iss: self.issuer.clone(),
            nonce: Some(subject.nonce.to_owned()),
            scopes: subject.scopes.map(<[String]>::to_vec),
            caller,
            session,
        };
        let claims = serde_json::to_vec(&claims).expect("claims have only string keys");
        let mut token = format!("{}.{}", self.header, BASE64.encode(claims));
        let signature = hmac::sign(&self.key, token.as_bytes());
        token.push('.');
        BASE64.encode_string(signature.as_ref(), &mut token);
        token
    }

    /// Returns the claims of a token that is valid at the Unix time `now`.
    pub fn verify(&self, now: u64, token: &str) -> Result<Claims, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::Invalid);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Invalid)?;
        let (header, claims) = signed.split_once('.').ok_or(TokenError::Invalid)?;
        if header != self.header {
            let header: Header = decode(header)?;
            if header.alg != "HS256" {
                return Err(TokenError::Invalid);
            }
        }
        let signature = BASE64.decode(signature).map_err(|_| TokenError::Invalid)?;
        hmac::verify(&self.key, signed.as_bytes(), &signature).map_err(|_| TokenError::Invalid)?;
        let claims: Claims = decode(claims)?;
        if claims.kind != "access" || claims.nbf > now {
            return Err(TokenError::Invalid);
        }
        if claims.exp <= now {
            return Err(TokenError::Expired);
        }
        Ok(claims)
    }
}

fn decode<T: serde::de::DeserializeOwned>(part: &str) -> Result<T, TokenError> {
    let bytes = BASE64.decode(part).map_err(|_| TokenError::Invalid)?;
    serde_json::from_slice(&bytes).map_err(|_| TokenError::Invalid)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tokens() -> AccessTokens {
        AccessTokens::new(&Secret::new("a seed that only tests use"), "shakenfist", 15)
    }

    fn signed(header: &str, claims: &str) -> String {
        let text = format!("{}.{}", BASE64.encode(header), BASE64.encode(claims));
        let signature = hmac::sign(&tokens().key, text.as_bytes());
        format!("{text}.{}", BASE64.encode(signature.as_ref()))
    }

    #[test]
    fn token_carries_its_claims_until_it_expires() {
        let token = tokens().create(1000, "ci", "deploy", "n0nce", None);
        let claims = tokens().verify(1899, &token).unwrap();
        assert_eq!(claims.sub, ("ci".into(), "deploy".into()));
        assert_eq!((claims.iat, claims.nbf, claims.exp), (1000, 1000, 1900));
        assert_eq!(
            (claims.kind.as_str(), claims.fresh, claims.iss.as_str()),
            ("access", false, "shakenfist")
        );
        assert_eq!((claims.nonce.as_deref(), claims.scopes), (Some("n0nce"), None));
        assert_eq!(tokens().verify(1900, &token), Err(TokenError::Expired));
        assert_eq!(tokens().verify(999, &token), Err(TokenError::Invalid));
    }

    #[test]
    fn subject_is_encoded_as_a_list() {
        let token = tokens().create(1000, "ci", "deploy", "n", None);
        let claims: serde_json::Value = decode(token.split('.').nth(1).unwrap()).unwrap();
        assert_eq!(claims["sub"], serde_json::json!(["ci", "deploy"]));
    }

    #[test]
    fn rejects_other_seeds_algorithms_and_token_types() {
        let other = AccessTokens::new(&Secret::new("another seed altogether"), "shakenfist", 15);
        assert_eq!(other.verify(1000, &tokens().create(1000, "a", "b", "c", None)), Err(TokenError::Invalid));
        let claims = r#"{"fresh":false,"iat":1,"nbf":1,"exp":9999,"jti":"x","type":"access","sub":["a","b"],"iss":"z"}"#;
        assert!(tokens().verify(5, &signed(r#"{"typ":"JWT","alg":"HS256"}"#, claims)).is_ok());
        for header in [r#"{"alg":"none"}"#, r#"{"alg":"HS512"}"#, r#"{"alg":"RS256"}"#, "{}", "x"] {
            assert_eq!(tokens().verify(5, &signed(header, claims)), Err(TokenError::Invalid), "{header}");
        }
        let refresh = claims.replace("access", "refresh");
        assert_eq!(tokens().verify(5, &signed(r#"{"alg":"HS256"}"#, &refresh)), Err(TokenError::Invalid));
    }

    proptest! {
        #[test]
        fn rejects_arbitrary_text_without_panic(text in "\\PC{0,200}") {
            prop_assert_eq!(tokens().verify(5, &text), Err(TokenError::Invalid));
        }

        #[test]
        fn rejects_token_with_one_changed_byte(at in 0usize..300, byte in 0x21u8..0x7f) {
            let token = tokens().create(1000, "ci", "deploy", "n0nce", None);
            let at = at % token.len();
            let mut bytes = token.clone().into_bytes();
            prop_assume!(bytes[at] != byte);
            bytes[at] = byte;
            // The last character of the signature has two unused bits; the decoder requires them to be zero.
            prop_assert!(tokens().verify(1000, &String::from_utf8(bytes).unwrap()).is_err());
        }
    }
}
